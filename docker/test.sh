#!/usr/bin/env bash
# Build the cpu target and train in it as an ordinary user, with buildah and no daemon: `make test-docker`. Needs root.
#
# Where no image registry is reached, the base image is a Debian made by debootstrap; BASE_IMAGE names another one.
# What pip is configured to on this machine is handed to the build as a secret.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

for tool in buildah debootstrap; do
  command -v "$tool" >/dev/null || { echo "make test-docker needs $tool; on Debian: apt-get install buildah debootstrap" >&2; exit 2; }
done
[ "$(id -u)" = 0 ] || { echo "make test-docker must be started by root: it makes a root file system" >&2; exit 2; }

work=$(mktemp -d)
tag=nntask-test-$$
containers=()
clean() {
  for container in "${containers[@]}"; do buildah rm "$container" >/dev/null 2>&1 || true; done
  for image in "$tag" "$tag-base"; do buildah rmi "$image" >/dev/null 2>&1 || true; done
  rm -rf "$work"
}
trap clean EXIT
export BUILDAH_ISOLATION=chroot STORAGE_DRIVER=vfs

if [ -z "${BASE_IMAGE:-}" ]; then
  debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$work/base" >"$work/debootstrap.log" 2>&1 ||
    { tail "$work/debootstrap.log" >&2; exit 1; }
  container=$(buildah from scratch)
  containers+=("$container")
  buildah add --quiet "$container" "$work/base" / >/dev/null
  buildah commit --quiet "$container" "$tag-base" >/dev/null
  rm -rf "$work/base"
  BASE_IMAGE=localhost/$tag-base
fi

python3 - "$work" <<'PYTHON'
"""pip's configuration of this machine, one value a key, with certificates where the build finds them."""
import shutil, subprocess, sys
from pathlib import Path

work, found = Path(sys.argv[1]), {}
for line in subprocess.run(["pip", "config", "list"], capture_output=True, text=True, check=True).stdout.splitlines():
    name, _, value = line.partition("=")
    found[name.rpartition(".")[2]] = value.strip("'")
(work / "ca.crt").touch()
if certificates := found.pop("cert", ""):
    shutil.copy(certificates, work / "ca.crt")
    found["cert"] = "/run/secrets/certificates"
(work / "pip.conf").write_text("".join(["[global]\n", *(f"{key} = {value}\n" for key, value in found.items())]))
PYTHON
buildah bud --quiet --build-arg BASE_IMAGE="$BASE_IMAGE" --secret id=pip,src="$work/pip.conf" --secret id=certificates,src="$work/ca.crt" \
  --target cpu -f docker/Dockerfile -t "$tag" . >"$work/build.log" 2>&1 || { tail -n 40 "$work/build.log" >&2; exit 1; }
echo "built the target cpu on $BASE_IMAGE"

run=$(buildah from --pull-never "$tag")
containers+=("$run")
inside() { buildah run "$run" -- "$@"; }
expect() { echo "$1"; shift; "$@" || { echo "failed: $*" >&2; exit 1; }; }

expect "the user is not root" test "$(inside id -u)" != 0
expect "the installation is not the user's to write" inside sh -c '! touch /opt/nntask/x 2>/dev/null'
expect "trains, saves, and continues" inside sh -c '
  nntask train --model tiny --steps 2 --run-dir run --sample-tokens 0 && nntask train --resume run --steps 3 --sample-tokens 0 &&
  test -s run/summary.json && test -d run/checkpoints/step-000003'
expect "caches lie in the volume" inside sh -c 'test -n "$(ls /data/.cache/nntask)" && test -n "$(ls /data/.cache/numba)"'
expect "SIGTERM saves and ends with 143" inside sh -c '
  nntask train --model tiny --steps 1000000 --run-dir long >log & pid=$!
  until grep -q "^step 2/" log; do kill -0 $pid || exit 1; sleep 0.2; done
  kill -TERM $pid; wait $pid; test $? = 143 && test -e long/latest'
expect "serves what it has trained, and SIGTERM ends it with 0" inside sh -c '
  nntask serve run --port 8000 >log & pid=$!
  until grep -q "^listening on" log; do kill -0 $pid || exit 1; sleep 0.2; done
  /opt/nntask/bin/python -c "import json, urllib.request as r; body = json.dumps({\"model\": \"run\", \"prompt\": \"a\", \"max_tokens\": 4}).encode()
print(r.urlopen(r.Request(\"http://127.0.0.1:8000/v1/completions\", body, {\"content-type\": \"application/json\"})).read())
assert b\"<title>run\" in r.urlopen(\"http://127.0.0.1:8000/\").read()" &&
  kill -TERM $pid; wait $pid; test $? = 0'
echo "the container trains and serves"
