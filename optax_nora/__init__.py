"""Nora (Normalized Orthogonal Row Alignment) for JAX, as optax gradient transformations."""

from optax_nora import baselines as baselines
from optax_nora import rules as rules
from optax_nora._adamw import StepTransformation as StepTransformation
from optax_nora._adamw import with_adamw as with_adamw
from optax_nora._geometry import RowGeometry as RowGeometry
from optax_nora._geometry import equilibrium_row_norm as equilibrium_row_norm
from optax_nora._geometry import row_geometry as row_geometry
from optax_nora._logical_axes import from_logical_axes as from_logical_axes
from optax_nora._master import MasterState as MasterState
from optax_nora._master import with_float32_master as with_float32_master
from optax_nora._momentum import MomentumState as MomentumState
from optax_nora._nora import nora as nora
from optax_nora._nora import scale_by_nora as scale_by_nora
from optax_nora._routing import infer_dimension_numbers as infer_dimension_numbers
from optax_nora._routing import matrix_mask as matrix_mask
from optax_nora._rules import by_path as by_path
from optax_nora._rules import default_routing as default_routing
from optax_nora._rules import in_shard_map as in_shard_map
from optax_nora._rules import kernels as kernels
from optax_nora._rules import stacked as stacked
from optax_nora._summary import summarize as summarize
from optax_nora._transforms import keep_row_norms as keep_row_norms
from optax_nora._transforms import row_normalize as row_normalize
from optax_nora._transforms import row_orthonormalize as row_orthonormalize
from optax_nora._transforms import row_project as row_project
from optax_nora._transforms import scale_by_row_shape as scale_by_row_shape

__version__ = "0.1.0"
