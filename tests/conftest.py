"""Set up before jax starts: eight devices on any machine, and hypothesis without surprises."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Devices that wait for each other longer than the terminate timeout (40 s by default) abort the
# process; eight of them on two busy cores may well.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
    + " --xla_cpu_collective_call_terminate_timeout_seconds=600"
)

import hypothesis
import jax
import pytest

# No deadline: an example's first call compiles. CI draws the same examples every time, so that a
# red run is the change's fault; HYPOTHESIS_PROFILE=thorough looks further.
hypothesis.settings.register_profile("fast", max_examples=25, deadline=None)
hypothesis.settings.register_profile("ci", max_examples=25, deadline=None, derandomize=True)
hypothesis.settings.register_profile("thorough", max_examples=500, deadline=None)
hypothesis.settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "fast")
)


@pytest.fixture(scope="module", autouse=True)
def free_compiled_programs():
    """Give back what a module compiled: each program maps memory, and Linux allows 65,530 maps."""
    yield
    jax.clear_caches()
