"""Which samples are stored (`reservoir`, `balanced`, `sharded`), and where (`memory`, `folder`, `ragged`)."""

from holdfast.buffer.balanced import BalancedReservoir
from holdfast.buffer.base import Draw, Plan
from holdfast.buffer.reservoir import Reservoir, distinct, place, widened, window
from holdfast.buffer.sharded import ShardedReservoir

__all__ = ["BalancedReservoir", "Draw", "Plan", "Reservoir", "ShardedReservoir", "distinct", "place"]
__all__ += ["widened", "window"]
