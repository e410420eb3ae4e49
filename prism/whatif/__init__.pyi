from .datacenters import (
    distance as distance,
)
from .datacenters import (
    enough as enough,
)
from .degradations import (
    CrossDatacenter as CrossDatacenter,
)
from .degradations import (
    HotGpu as HotGpu,
)
from .degradations import (
    NodeSpeeds as NodeSpeeds,
)
from .degradations import (
    SlowLink as SlowLink,
)
from .histories import (
    flapping as flapping,
)
from .histories import (
    follow as follow,
)
from .histories import (
    rotating as rotating,
)
from .histories import (
    throttled as throttled,
)
from .placement import (
    optimise_placement as optimise_placement,
)
from .placement import (
    position_costs as position_costs,
)
from .scaling import (
    Spread as Spread,
)
from .scaling import (
    assumed_spreads as assumed_spreads,
)
from .scaling import (
    at_size as at_size,
)
from .scaling import (
    scale as scale,
)
from .scenarios import (
    Frozen as Frozen,
)
from .scenarios import (
    HotNode as HotNode,
)
from .scenarios import (
    Scenario as Scenario,
)
from .scenarios import (
    Together as Together,
)
from .scenarios import (
    increases as increases,
)
from .scenarios import (
    stages_by_node as stages_by_node,
)
from .scenarios import (
    unchanged as unchanged,
)
from .sweeping import (
    Executor as Executor,
)
from .sweeping import (
    SweepError as SweepError,
)
from .sweeping import (
    sweep as sweep,
)
from .sweeping import (
    switching as switching,
)
