"""What the sequences of a pool share."""

from pyllama_kvflash.errors import PoolError
from pyllama_kvflash.native import Context
from pyllama_kvflash.options import Options, cores
from pyllama_kvflash.policy import Blocks
from pyllama_kvflash.policy.sizing import PoolShape, n_pinned
from pyllama_kvflash.pool.disk import slabs_in
from pyllama_kvflash.pool.guests import GuestRoom
from pyllama_kvflash.pool.host_memory import HostMemory
from pyllama_kvflash.pool.moves import Moves


class Shared:
    """The parts that the sequences of a pool share: its blocks, host memory for records, and each sequence's moves and guests."""

    def __init__(self, ctx: Context, options: Options, n_pool: int) -> None:
        info = ctx.pool_info()
        self.blocks = Blocks(n_pool // options.chunk)
        spill = slabs_in(options.disk) if options.disk else None
        limit, n_growers = options.host_limit, max(1, cores() // 2)  # the other cores compute
        self.memory = HostMemory(info.record_bytes, ctx.host_buffer, limit, info.meta_bytes, spill, n_growers)
        self.moves: list[Moves] = []
        self.guests: list[GuestRoom] = []  # one per sequence; empty without codes

    def close(self) -> None:
        """Free the host memory, once all pagers are closed."""
        self.memory.close()

    def n_pinned(self) -> int:
        """Return the number of pinned chunks that are not sinks, over all sequences."""
        return sum(n_pinned(ledger.pins, ledger.n_sinks) for ledger in self.blocks.ledgers)

    def shape(self, n_more: int = 0) -> PoolShape:
        """Return the pool's shape with n_more additional pinned chunks."""
        ledger = self.blocks.ledgers[0]
        n_seq = len(self.blocks.ledgers)
        return PoolShape(ledger.chunk, ledger.n_sinks, ledger.n_tail, self.n_pinned() + n_more, n_seq)

    def check_pins(self, n_more: int, n_batch: int, what: str) -> None:
        """Raise PoolError if the pool has too little room for n_more additional pinned chunks and batches of n_batch tokens.

        what: the cause of the pins, for the message.
        """
        shape = self.shape(n_more)
        floor = shape.floor(n_batch)
        if floor > self.n_pool:
            msg = (
                f"{what} makes {shape.pinned:,} pinned chunks, which need a pool of {floor:,} tokens;"
                f" this one has {self.n_pool:,}: use a larger pool or pin less"
            )
            raise PoolError(msg)

    def confine(self, n_pool: int) -> None:
        """Behave like a smaller pool of n_pool positions, for all sequences, until this is called again."""
        self.blocks.n = n_pool // self.blocks.ledgers[0].chunk

    @property
    def n_pool(self) -> int:
        """Tokens that the blocks can hold."""
        return self.blocks.n * self.blocks.ledgers[0].chunk
