"""Set up before jax starts: eight devices on any machine, and hypothesis without surprises."""

import gc
import importlib.metadata
import os
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Devices that wait for each other longer than the terminate timeout (40 s by default) abort the
# process; eight of them on two busy cores may well.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
    + " --xla_cpu_collective_call_terminate_timeout_seconds=600"
)

# Nearly all of the suite's time would go to compiling programs that run once. So LLVM optimizes
# little, and what one test compiled the next one loads; the workers of xdist and other processes
# inherit all this. COMPILE=full optimizes as for users.
if os.environ["JAX_PLATFORMS"] == "cpu" and os.environ.get("COMPILE") != "full":
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"
    # The older of two code generators takes half the time. jaxlib 0.12 has the newer one alone,
    # and 0.8's older one loses digits of rows nearly along their weights; users have the newer.
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    compiled = tempfile.TemporaryDirectory(prefix="compiled-")  # until this process ends
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled.name

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
    gc.collect()


gc.set_threshold(50_000, 20, 50)  # tracing makes many objects and few cycles; see above for those


@pytest.fixture
def optimized():
    """For tests that take longer to run than to compile, or compare bits of unlike programs."""
    ours = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", ours)
