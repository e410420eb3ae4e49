from .fitting import (
    Fit as Fit,
)
from .fitting import (
    fit as fit,
)
from .fitting import (
    fit_families as fit_families,
)
from .fitting import (
    fits_dataset as fits_dataset,
)
from .pool import (
    FAMILIES as FAMILIES,
)
from .pool import (
    Bimodal as Bimodal,
)
from .pool import (
    DurationPool as DurationPool,
)
from .pool import (
    Empirical as Empirical,
)
from .pool import (
    Fixed as Fixed,
)
from .pool import (
    Gamma as Gamma,
)
from .pool import (
    HeavyTail as HeavyTail,
)
from .pool import (
    LogNormal as LogNormal,
)
from .pool import (
    Lowered as Lowered,
)
from .pool import (
    MaxOf as MaxOf,
)
from .pool import (
    Normal as Normal,
)
from .pool import (
    Parametric as Parametric,
)
from .pool import (
    Scaled as Scaled,
)
from .pool import (
    Shifted as Shifted,
)
from .pool import (
    lower as lower,
)
