"""Peers of Nora behind Nora's signature and routing, for fair comparisons."""

from optax_nora.baselines._adamp import adamp as adamp
from optax_nora.baselines._adamp import sgdp as sgdp
from optax_nora.baselines._mano import mano as mano
from optax_nora.baselines._muon import muon as muon
from optax_nora.baselines._rmnp import rmnp as rmnp
from optax_nora.baselines._sso import sso as sso
