#!/usr/bin/env bash
# The C++ side without Python: every shared header compiles alone, with g++ and (where found) nvcc, warnings as errors;
# the host engine, the masks, the parsers and batches for a GPU run their random drivers under ASan and UBSan, what has
# threads under TSan.
# usage: tests/native/run_sanitized.sh [rounds]
set -euo pipefail
cd "$(dirname "$0")/../.."
rounds=${1:-300}
jobs=$(nproc 2>/dev/null || echo 2)
run() { make --no-print-directory -s -j"$jobs" -f tests/native/Makefile "$@"; }

run headers
echo "headers: each compiles alone with ${CXX:-g++}"

nvcc=${FLASHTRIE_NVCC:-$(command -v nvcc || true)}
if [ -n "$nvcc" ]; then
  run nvcc NVCC="$nvcc"
  echo "headers and kernels: compile with $nvcc"
else
  echo "SKIPPED: headers and kernels with nvcc, which is not on PATH (FLASHTRIE_NVCC names one)"
fi

run drivers
export ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1
build/sanitized/fuzz_host "$rounds"
build/sanitized/fuzz_masks "$((rounds / 10))"
build/sanitized/fuzz_parsers
build/sanitized/fuzz_batch "$rounds"
build/sanitized/race_host "$((rounds / 10))"
build/sanitized/race_batch "$((rounds / 3))"
