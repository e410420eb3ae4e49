from .intervals import (
    anderson_darling as anderson_darling,
)
from .intervals import (
    block_indices as block_indices,
)
from .intervals import (
    crps as crps,
)
from .intervals import (
    effective_size as effective_size,
)
from .intervals import (
    guarantee as guarantee,
)
from .intervals import (
    increase as increase,
)
from .intervals import (
    independent as independent,
)
from .intervals import (
    ks_distance as ks_distance,
)
from .intervals import (
    ks_interval as ks_interval,
)
from .intervals import (
    ks_noise_floor as ks_noise_floor,
)
from .intervals import (
    mean_interval as mean_interval,
)
from .intervals import (
    min_draws as min_draws,
)
from .intervals import (
    p95 as p95,
)
from .intervals import (
    quantile_interval as quantile_interval,
)
from .intervals import (
    share_interval as share_interval,
)
from .random_effects import (
    Components as Components,
)
from .random_effects import (
    variance_components as variance_components,
)
