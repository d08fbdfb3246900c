"""`make bench ARGS=allocators` measures, and gives back whatever it takes."""

import json
import subprocess
import sys


def test_the_allocators_are_measured_side_by_side():
    asked = ["allocators", "--slots", "10000", "--runs", "1", "--json", "-"]
    done = subprocess.run([sys.executable, "-m", "ci.bench", *asked], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {(row["work"], row["pools"], row["page"]) for row in rows} == {
        (work, pools, page) for work in ("extend", "decode", "free") for pools in (1, 2) for page in (1, 16)
    }
    assert all(row["ours_us"] > 0 and row["theirs_us"] > 0 for row in rows)
