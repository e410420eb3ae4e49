from .quantiles_by_size import (
    size_quantiles as size_quantiles,
)
from .reading import (
    CollectivesError as CollectivesError,
)
from .reading import (
    read_collectives as read_collectives,
)
