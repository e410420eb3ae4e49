from .ablation import (
    STATISTICS as STATISTICS,
)
from .ablation import (
    ablate as ablate,
)
from .ablation import (
    partition as partition,
)
from .persistence import (
    persistent_share as persistent_share,
)
from .steadying import (
    saved_by as saved_by,
)
from .steadying import (
    steadying as steadying,
)
from .variability_budget import (
    budget as budget,
)
