#!/usr/bin/env bash
# All that only a GPU shows, in one command and under six minutes: build, tests, sanitizer,
# microbenchmarks, the loop; everything into one JSON file.
#
#     bench/gpu_check.sh [FOLDER]          # results in FOLDER, default build/gpu
#     bench/gpu_check.sh --dry [FOLDER]    # the same steps on a CPU: interpreter, tiny shapes
#
# A step that fails, runs out of time or lacks its tool is reported and does not stop the others.
set -uo pipefail
cd "$(dirname "$0")/.."
dry=""
if [ "${1:-}" = --dry ]; then dry=1; shift; fi
out=$(realpath -m "${1:-build/gpu}")
python=${PYTHON:-python3}
export PYTHONPATH="$PWD:$PWD/python${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export PATH="$PATH:${CUDA_HOME:-/usr/local/cuda}/bin"
export CUBLAS_WORKSPACE_CONFIG=:4096:8 # the tests ask torch for deterministic algorithms
export HF_HUB_OFFLINE=1
rm -rf "$out"
mkdir -p "$out"

tiny=(--batch 2 --vocab 1000 --top-k 4 --depth 3 --nodes 9 --threads 1 --seconds 0.01
  --heads 4,2,64 --prefix 100)
operators=() # those with a figure to reach first
for op in expand tree_attention rerank accept sample select_leaves enter_level verify compact_kv; do
  operators+=(--op "$op")
done
tests=(-m pytest -q -p no:cacheprovider --continue-on-collection-errors)
flex=(--op tree_attention --form triton --form flex)
search=(--op expand --op tree_attention --form triton)
if [ "$dry" ]; then
  export TRITON_INTERPRET=1 EAGLE2_CUDA_ARCHS=${EAGLE2_CUDA_ARCHS:-90}
  patience=20 checked=(env) searching=(env) # there is nothing to time
  tests+=(-m "not gpu and not full" tests/test_on_gpu.py tests/test_cycle.py)
  tiny+=(--dtype float32)
  small=("${tiny[@]}" --form triton "${operators[@]}")
  ops=("${small[@]}") flex+=("${tiny[@]}") search+=("${tiny[@]}")
  loop=(--shape tiny --dtype float32 --device cpu --prompt 16 --new 16)
else
  unset TRITON_INTERPRET
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1)
  export EAGLE2_CUDA_ARCHS=${EAGLE2_CUDA_ARCHS:-${capability/./}}
  patience=1 checked=(env PYTORCH_NO_CUDA_MEMORY_CACHING=1) searching=(env EAGLE2_SEARCH=1)
  tests+=(-m "gpu and not full")
  # kernels compile side by side
  if "$python" -c "import xdist"; then tests+=(-n "$(($(nproc) > 2 ? $(nproc) - 2 : 1))"); fi
  small=("${tiny[@]}" --device cuda --dtype bfloat16 --form triton --form cuda "${operators[@]}")
  large=(--device cuda --seconds 0.05 --dtype bfloat16 --threads 1 --heads 32,8,128
    --prefix 32768 --prefix 2048)
  ops=("${large[@]}" --op operators "${operators[@]}") flex+=("${large[@]}" --nodes 60)
  search+=("${large[@]}" --vocab 128256 --nodes 60)
  loop=()
fi

step() { # step NAME SECONDS COMMAND...
  local name=$1 limit=$(($2 * patience)) begin=$SECONDS status
  shift 2
  # interrupted, Python says where it was and pytest what had failed
  timeout -s INT -k 10 "$limit" "$@" >"$out/$name.log" 2>&1
  status=$?
  echo "$name: exit $status, $((SECONDS - begin)) s" | tee -a "$out/steps.txt"
  [ "$status" = 0 ] || tail -n 30 "$out/$name.log"
}

sanitize() {
  local tool command
  for tool in memcheck racecheck; do
    command=("${checked[@]}")
    [ "$dry" ] || command+=(compute-sanitizer --error-exitcode 1 --tool "$tool")
    step "$tool" 55 "${command[@]}" "$python" bench/tree_ops.py "${small[@]}"
  done
}

step build 45 "$python" setup.py build_ext --inplace
step env 15 "$python" -m eagle2.env
sanitize & # takes no times, so it may run beside the tests
step tests 110 env OMP_NUM_THREADS=1 "$python" "${tests[@]}"
wait
step tree_ops 75 "$python" bench/tree_ops.py "${ops[@]}" --json "$out/tree_ops.json"
step search 25 "${searching[@]}" "$python" bench/tree_ops.py "${search[@]}" --json "$out/search.json"
step loop 45 "$python" bench/stand_in.py ${loop[@]+"${loop[@]}"} --json "$out/loop.json"
step flex 40 "$python" bench/tree_ops.py "${flex[@]}" --json "$out/flex.json"

"$python" - "$out" <<'END'
import json, pathlib, sys

out = pathlib.Path(sys.argv[1])
steps = (out / "steps.txt").read_text().splitlines()
logs = {file.stem: file.read_text(errors="replace") for file in sorted(out.glob("*.log"))}
result = {"steps": steps, "logs": {name: log.splitlines()[-30:] for name, log in logs.items()}}
for name in ("tree_ops", "search", "loop", "flex"):
    try:
        result[name] = json.loads((out / f"{name}.json").read_text())
    except (OSError, ValueError) as error:
        result[name] = f"none: {error}"
(out / "results.json").write_text(json.dumps(result, indent=1) + "\n")
END
echo "results: $out/results.json"
! grep -qv "exit 0," "$out/steps.txt"
