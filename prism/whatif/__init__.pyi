from .datacenters import (
    bandwidth_needed as bandwidth_needed,
)
from .datacenters import (
    split_cost as split_cost,
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
    rotating as rotating,
)
from .histories import (
    simulate_course as simulate_course,
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
    weak_scaling as weak_scaling,
)
from .scenarios import (
    Compose as Compose,
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
