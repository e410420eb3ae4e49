from .components import (
    characterise as characterise,
)
from .components import (
    correlations as correlations,
)
from .reading import (
    FleetError as FleetError,
)
from .reading import (
    merge_fleets as merge_fleets,
)
from .reading import (
    read_fleet as read_fleet,
)
from .spatial_temporal import (
    device_medians as device_medians,
)
from .spatial_temporal import (
    relative_pool as relative_pool,
)
from .spatial_temporal import (
    variability as variability,
)
from .synthetic import (
    ReferenceFleet as ReferenceFleet,
)
from .synthetic import (
    synthetic_fleet as synthetic_fleet,
)
