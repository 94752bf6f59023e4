"""Which samples are stored (`reservoir`, `balanced`, `sharded`), and where (`memory`, `folder`, `ragged`)."""

from holdfast.buffer.balanced import BalancedReservoir
from holdfast.buffer.base import Draw, Placement, Plan, Storage
from holdfast.buffer.reservoir import Reservoir, distinct, place, widened, window
from holdfast.buffer.sharded import ShardedReservoir

__all__ = [
    "BalancedReservoir",
    "Draw",
    "Placement",
    "Plan",
    "Reservoir",
    "ShardedReservoir",
    "Storage",
    "distinct",
    "place",
    "widened",
    "window",
]
