from . import (
    schema as schema,
)
from . import (
    specs as specs,
)
from . import (
    stats as stats,
)
from . import (
    tables as tables,
)
