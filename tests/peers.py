"""Nora's peers for a whole model, each of its parts, as a user puts them together."""

import functools

import optax

from optax_nora import baselines, scale_by_row_shape, with_adamw

NAMES = ("rmnp", "mano", "muon", "sso", "adamp", "sgdp")


def peer(
    name,
    learning_rate,
    weight_decay=0.0,
    weight_decay_mask=None,
    *,
    row_scale=None,
    base_fan_in=None,
    weight_dimension_numbers=None,
    **settings,
):
    """Settings that begin with ``adam_`` are AdamW's, all others of the peer's own part."""
    adam = {key: settings.pop(key) for key in list(settings) if key.startswith("adam_")}
    decay = {"weight_decay": weight_decay, "weight_decay_mask": weight_decay_mask}
    if name in ("adamp", "sgdp"):  # they decay by themselves
        settings |= decay
        decay = {}
    rule = getattr(baselines, f"scale_by_{name}")(**settings)
    if name in ("rmnp", "mano", "muon"):
        rule = optax.chain(
            rule, scale_by_row_shape(row_scale or "fan_ratio", base_fan_in=base_fan_in)
        )
    numbers = {"weight_dimension_numbers": weight_dimension_numbers}
    tx = with_adamw(rule, learning_rate, **decay, **numbers, **adam)
    return optax.chain(tx, baselines.to_spectral_sphere(**numbers)) if name == "sso" else tx


PEERS = {name: functools.partial(peer, name) for name in NAMES}
