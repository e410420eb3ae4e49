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
    savings as savings,
)
from .steadying import (
    savings_by_place as savings_by_place,
)
from .variability_budget import (
    budget as budget,
)
