"""Peers of Nora for fair comparisons: rules for matrices, to be put into `with_adamw`."""

from optax_nora.baselines._adamp import scale_by_adamp as scale_by_adamp
from optax_nora.baselines._adamp import scale_by_sgdp as scale_by_sgdp
from optax_nora.baselines._mano import scale_by_mano as scale_by_mano
from optax_nora.baselines._muon import scale_by_muon as scale_by_muon
from optax_nora.baselines._rmnp import scale_by_rmnp as scale_by_rmnp
from optax_nora.baselines._sso import scale_by_sso as scale_by_sso
from optax_nora.baselines._sso import to_spectral_sphere as to_spectral_sphere
