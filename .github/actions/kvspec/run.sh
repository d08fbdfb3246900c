#!/usr/bin/env bash
# The steps of the action. Results go to .kvspec: report.txt, report.json, junit.xml, and failures, the traces of
# every fault that was ever met, with their pages; they are replayed before anything else.
set -euo pipefail
home=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)

key() {
  echo "key=$(cat "$home/pyproject.toml" "$home/ci/constraints.txt" | sha256sum | cut -c1-16)"
}

install() {
  local pip=(python -m pip --disable-pip-version-check install --quiet)
  if [ -n "${KVSPEC_TORCH_INDEX:-}" ]; then
    "${pip[@]}" --index-url "$KVSPEC_TORCH_INDEX" "$(grep '^torch==' "$home/ci/constraints.txt")"
  fi
  "${pip[@]}" -c "$home/ci/constraints.txt" -e "$home[torch]"
}

check() {
  local tier=${KVSPEC_TIER:-smoke} seed='' code=0 engine='' path='' impl base=() more=() earlier
  if [ -n "${KVSPEC_SGLANG_PATH:-}" ]; then
    engine=sglang path=$KVSPEC_SGLANG_PATH
  elif [ -n "${KVSPEC_VLLM_PATH:-}" ]; then
    engine=vllm path=$KVSPEC_VLLM_PATH
  fi
  impl=(--impl "${KVSPEC_IMPL:-torch}")
  if [ -n "$engine" ]; then
    case ${KVSPEC_IMPL:-} in
      "$engine"+*) ;; # a way to run the checkout, such as sglang+overlap
      *) impl=(--impl "$engine") ;;
    esac
    impl+=("--$engine-path" "$path")
  fi
  impl+=(--device "${KVSPEC_DEVICE:-cpu}")
  if [ -n "${KVSPEC_BASE:-}" ]; then
    base=(--base "$KVSPEC_BASE")
  fi
  mkdir -p .kvspec/failures
  shopt -s nullglob
  earlier=(.kvspec/failures/*.json)
  if [ ${#earlier[@]} -gt 0 ]; then
    kvspec replay "${earlier[@]}" "${impl[@]}" "${base[@]}" || code=$?
  fi
  if [ "$tier" = nightly ]; then
    seed=$(date +%s)
    more+=(--seed "$seed")
    echo "seed $seed"
  fi
  # KVSPEC_ARGS are several words.
  # shellcheck disable=SC2086
  kvspec check "${impl[@]}" "${base[@]}" --tier "$tier" --save .kvspec/failures --html \
    --json .kvspec/report.json --junit .kvspec/junit.xml "${more[@]}" ${KVSPEC_ARGS:-} \
    | tee .kvspec/report.txt || code=$?
  python "$home/.github/actions/kvspec/annotations.py" .kvspec/report.json || true
  if [ -n "${GITHUB_STEP_SUMMARY:-}" ]; then
    { echo "### kvspec, tier $tier${seed:+, seed $seed}"
      python -c 'import json; print(json.load(open(".kvspec/report.json"))["verdict"])' || true
    } >> "$GITHUB_STEP_SUMMARY"
  fi
  return "$code"
}

"$@"
