from . import (
    bench as bench,
)
from . import (
    collectives as collectives,
)
from . import (
    fleet as fleet,
)
from . import (
    telemetry as telemetry,
)
