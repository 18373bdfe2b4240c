#!/usr/bin/env bash
# All that only a GPU shows, in one command and under six minutes: build, tests, sanitizer,
# microbenchmarks, the loop; everything into one JSON file.
#
#     bench/gpu_check.sh [FOLDER]          # results in FOLDER, default build/gpu
#     bench/gpu_check.sh --dry [FOLDER]    # the same steps on a CPU: interpreter, tiny shapes
#
# A step that fails or runs out of time is reported and does not stop the others.
set -uo pipefail
cd "$(dirname "$0")/.."
dry=""
if [ "${1:-}" = --dry ]; then dry=1; shift; fi
out=$(realpath -m "${1:-build/gpu}")
python=${PYTHON:-python3}
export PYTHONPATH="$PWD:$PWD/python${PYTHONPATH:+:$PYTHONPATH}"
export CUBLAS_WORKSPACE_CONFIG=:4096:8 # the tests ask torch for deterministic algorithms
rm -rf "$out"
mkdir -p "$out"

small=(--batch 2 --vocab 1000 --top-k 4 --depth 3 --nodes 9 --threads 1 --seconds 0.01
  --heads 4,2,64 --prefix 100)
operators=()
for op in expand select_leaves enter_level rerank tree_attention sample verify accept compact_kv; do
  operators+=(--op "$op")
done
if [ "$dry" ]; then
  export TRITON_INTERPRET=1
  patience=20 marker="not gpu and not full" tests=(tests/test_on_gpu.py tests/test_cycle.py)
  check=() small+=(--dtype float32 "${operators[@]}")
  ops=("${small[@]}" --form triton)
  loop=(--shape tiny --dtype float32 --device cpu --prompt 16 --new 16)
else
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1)
  export EAGLE2_CUDA_ARCHS=${EAGLE2_CUDA_ARCHS:-${capability/./}}
  patience=1 marker="gpu and not full" tests=(-n 8 tests) # kernels compile side by side
  check=(compute-sanitizer --error-exitcode 1 --tool)
  small+=(--device cuda --dtype bfloat16 --form triton --form cuda "${operators[@]}")
  ops=(--device cuda --seconds 0.05 --dtype bfloat16 --threads 1 --prefix 2048 --prefix 32768)
  loop=()
fi

step() { # step NAME SECONDS COMMAND...
  local name=$1 limit=$(($2 * patience)) begin=$SECONDS status
  shift 2
  timeout "$limit" "$@" >"$out/$name.log" 2>&1
  status=$?
  echo "$name: exit $status, $((SECONDS - begin)) s" | tee -a "$out/steps.txt"
  [ "$status" = 0 ] || tail -n 30 "$out/$name.log"
}

step build 60 "$python" setup.py build_ext --inplace
step env 15 "$python" -m eagle2.env
step tests 105 "$python" -m pytest -q -m "$marker" -p no:cacheprovider "${tests[@]}"
for tool in memcheck racecheck; do
  step "$tool" 35 ${check[@]+"${check[@]}" "$tool"} "$python" bench/tree_ops.py "${small[@]}"
done
step tree_ops 65 "$python" bench/tree_ops.py "${ops[@]}" --json "$out/tree_ops.json"
step loop 45 "$python" bench/stand_in.py ${loop[@]+"${loop[@]}"} --json "$out/loop.json"

"$python" - "$out" <<'END'
import json, pathlib, sys

out = pathlib.Path(sys.argv[1])
result = {"steps": (out / "steps.txt").read_text().splitlines()}
for name in ("env", "tests"):
    result[name] = (out / f"{name}.log").read_text().splitlines()[-30:]
for name in ("tree_ops", "loop"):
    file = out / f"{name}.json"
    result[name] = json.loads(file.read_text()) if file.exists() else None
(out / "results.json").write_text(json.dumps(result, indent=1) + "\n")
END
echo "results: $out/results.json"
! grep -qv "exit 0," "$out/steps.txt"
