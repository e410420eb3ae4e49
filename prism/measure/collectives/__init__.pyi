from .quantiles_by_size import (
    latency as latency,
)
from .reading import (
    CollectivesError as CollectivesError,
)
from .reading import (
    read_collectives as read_collectives,
)
