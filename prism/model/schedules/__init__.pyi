from .bidirectional import (
    dualpipe as dualpipe,
)
from .bidirectional import (
    dualpipev as dualpipev,
)
from .generators import (
    gpipe as gpipe,
)
from .generators import (
    gpipe_lifo as gpipe_lifo,
)
from .generators import (
    interleaved as interleaved,
)
from .generators import (
    one_f_one_b as one_f_one_b,
)
from .generators import (
    zb_h1 as zb_h1,
)
from .generators import (
    zb_h2 as zb_h2,
)
from .generators import (
    zbv as zbv,
)
from .registry import (
    SCHEDULES as SCHEDULES,
)
from .schedule import (
    Op as Op,
)
from .schedule import (
    Schedule as Schedule,
)
from .schedule import (
    ScheduleError as ScheduleError,
)
from .schedule import (
    read_schedule as read_schedule,
)
