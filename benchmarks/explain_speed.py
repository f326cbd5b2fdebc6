#!/usr/bin/env python3
"""CPU time and memory of explain on a long log of the worst kind.

    python benchmarks/explain_speed.py             1 GB, two minutes, and as much disk
    python benchmarks/explain_speed.py --mb 100

Eight ranks write lines that differ in more than digits, so no line is known from another one; the
failure comes at the end. The exit status is 0 only below 90 s of CPU and 100 MiB for 1 GB.
"""

import argparse
import random
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CPU_S_PER_GB, MEMORY_MIB = 90.0, 100.0
WORDS = 4096
END = (
    "[rank3]: Traceback (most recent call last):\n"
    '[rank3]:   File "train.py", line 81, in <module>\n'
    "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a "
    "total capacity of 79.15 GiB of which 1.19 GiB is free.\n"
)


def write_log(path: Path, size: int) -> int:
    """Write a log of about so many bytes; return the number of its lines."""
    source = random.Random(0)
    words = ["".join(source.choices("abcdefghijklmnop", k=9)) for _ in range(WORDS)]
    num_bytes = step = 0
    with path.open("w", encoding="ascii") as file:
        while num_bytes < size:
            step += 1
            lines = [
                f"[rank{rank}]: {step} loss {source.random():.6f} {words[step % WORDS]} "
                f"{words[step // WORDS % WORDS]} {' '.join(source.choices(words, k=4))} {rank}\n"
                for rank in range(8)
            ]
            num_bytes += file.write("".join(lines))
        file.write(END)
    return 8 * step + END.count("\n")


def main() -> int:
    """Write the log, explain it, print what that took."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mb", type=int, default=1000)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the log is removed
    size_gb = (options := parser.parse_args()).mb / 1000
    with tempfile.TemporaryDirectory(prefix="explain-speed-") as folder:
        num_lines = write_log(log := Path(folder) / "out.log", options.mb * 1_000_000)
        command = [sys.executable, "-m", "ddp_doctor", "explain", str(log)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s, memory_mib = used.ru_utime + used.ru_stime, used.ru_maxrss / 1024
    print(done.stdout.partition("\n")[0])
    print(
        f"{num_lines:,} lines, {size_gb:g} GB: {cpu_s:.0f} s of CPU, {memory_mib:.0f} MiB at most"
    )
    return int(
        cpu_s > CPU_S_PER_GB * size_gb or memory_mib > MEMORY_MIB or "rank 3" not in done.stdout
    )


if __name__ == "__main__":
    sys.exit(main())
