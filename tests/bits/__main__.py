"""The ledger of the library's bits: `python -m tests.bits` compares with it, `--write` records it.

    python -m tests.bits [--write] [--quick] [--few] [--backend oracle,interpreter,gpu]

ledger.txt has a line per cell with hashes by kind of value; the other files have signatures, texts of `--help`, entries
of state dicts and files of checkpoints. A line may change only in a commit that says why.

Sums of floats depend on a CPU's instructions, so the rows are computed with those that every x86-64 CPU has, in one
thread and without oneDNN. Where AVX2 is used instead, losses, gradients and what torch.optim, Muon and the histories
of delayed scaling make of them differ; codes, scales, masters and moments of the other optimizers do not. The ledger is
one of torch 2.13.
"""

from __future__ import annotations

import os

# before torch is imported: the same instructions on every CPU, in one thread; ranks inherit the variables
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("ATEN_CPU_CAPABILITY", "default")
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")
os.environ["COLUMNS"] = "80"
os.environ["TERM"] = "dumb"

import argparse
import sys
import time

parser = argparse.ArgumentParser(prog="python -m tests.bits", description="Compare with the ledger of bits.")
parser.add_argument("--write", action="store_true", help="record instead of comparing")
parser.add_argument("--quick", dest="choice", action="store_const", const="quick", help="a sixth of the cells")
parser.add_argument(
    "--few", dest="choice", action="store_const", const="few", help="each recipe and optimizer of the oracle once"
)
parser.add_argument("--backend", default="oracle,interpreter", help="oracle, interpreter or gpu, with commas between")

if __name__ == "__main__":
    arguments = parser.parse_args()
    backends = arguments.backend.split(",")
    if "interpreter" in backends:
        os.environ["TRITON_INTERPRET"] = "1"
    from tests.bits.ledger import compare
    from tests.distributed import pool

    # ranks then import nothing again
    pool.IMPORTED = pool.LIBRARY
    pool.fork_server()
    begin = time.monotonic()
    differences, count = compare(backends, arguments.choice, arguments.write)
    print("\n".join(differences) or "no differences", f"{count} rows in {time.monotonic() - begin:.0f} s", sep="\n")
    sys.stdout.flush()
    pool._close()
    # at a normal exit Python would wait for ranks that are stopped, forever
    os._exit(int(bool(differences) and not arguments.write))
