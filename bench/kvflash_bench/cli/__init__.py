"""The commands that `kvflash` has where this package is installed: `kvflash bench` and `kvflash plot`."""

from kvflash_bench.cli.answers import bench
from kvflash_bench.cli.plot import plot
from kvflash_bench.cli.spec import spec
from kvflash_bench.cli.speed import paging, speed

__all__ = ["bench", "plot"]

for _command in (speed, paging, spec):
    bench.add_command(_command)
