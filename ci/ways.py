"""Measure which functions of each engine run in which ways (stateful_tests/check/trees/ways.json).

`python -m ci.ways [ENGINE...]`, when a release is added; it takes minutes.
"""

from __future__ import annotations

import json
import sys

from impl.system_spec import ENGINES
from stateful_tests.check.trees import way_map, way_measurement

if __name__ == "__main__":
    maps = json.loads(way_map.FILE.read_text("utf-8")) if way_map.FILE.is_file() else {}
    for engine in sys.argv[1:] or ENGINES:
        maps[engine] = way_measurement.measure_ways(engine)
        way_map.FILE.write_text(json.dumps(maps, indent=0, sort_keys=True) + "\n", "utf-8")
        print(engine, sum(map(len, maps[engine]["functions"].values())), "functions")
