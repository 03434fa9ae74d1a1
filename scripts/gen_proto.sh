#!/usr/bin/env bash
# Generates proto/v1/*_pb2.py and .pyi into $1 (default: the repository). Needs grpcio-tools <= 1.62 (scripts/requirements/proto.txt).
set -euo pipefail
cd "$(dirname "$0")/.."
out="${1:-.}"
mkdir -p "$out/build/protogen"
"${PYTHON:-python3}" -m grpc_tools.protoc -Iweight_sync/proto=proto \
  --python_out="$out/build/protogen" --pyi_out="$out/build/protogen" proto/v1/*.proto
mkdir -p "$out/proto/v1"
cp "$out"/build/protogen/weight_sync/proto/v1/*_pb2.py* "$out/proto/v1/"
