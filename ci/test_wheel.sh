#!/usr/bin/env bash
# Make a wheel of a source distribution, install it where there is no checkout, and run the suite on it.
# ci/test_wheel.sh FOLDER [options of pytest]
set -euo pipefail
home=$(cd "$(dirname "$0")/.." && pwd)
folder=$(cd "$1" && pwd)
shift
python3 -m venv "$folder/venv"
pip=("$folder/venv/bin/python" -m pip --disable-pip-version-check)
"${pip[@]}" install --quiet -c "$home/ci/constraints.txt" hatchling
(cd "$home" && "$folder/venv/bin/python" -m hatchling build --target sdist --directory "$folder/dist")
"${pip[@]}" wheel --quiet --no-deps --wheel-dir "$folder/dist" "$folder"/dist/kvspec-*.tar.gz
(cd "$home" && "$folder/venv/bin/python" -m ci.packing tests "$folder")
wheel=$(echo "$folder"/dist/kvspec-*.whl)
"${pip[@]}" install --quiet -c "$home/ci/constraints.txt" "${wheel}[test]"
cd "$folder"
# These are about the repository: its workflows, documents and folders, its mutants, and how the wheel is made.
"$folder/venv/bin/python" -m pytest -q -n auto -p kvspec_tests.options --strict-markers kvspec_tests \
  --ignore kvspec_tests/cli/test_ci_files.py --ignore kvspec_tests/cli/test_spec.py \
  --ignore kvspec_tests/cli/test_house.py --ignore kvspec_tests/cli/test_mutants.py --ignore kvspec_tests/cli/test_wheel.py "$@"
