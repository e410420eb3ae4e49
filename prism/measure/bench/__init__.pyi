from .collective import (
    CollectiveError as CollectiveError,
)
from .collective import (
    measure_collectives as measure_collectives,
)
from .gemm import (
    measure_gemm as measure_gemm,
)
from .telemetry import (
    measure_telemetry as measure_telemetry,
)
from .training import (
    CONDITIONS as CONDITIONS,
)
from .training import (
    Layout as Layout,
)
from .training import (
    TrainingError as TrainingError,
)
from .training import (
    record_training as record_training,
)
