#!/bin/sh
# Gives a CI machine the browser that tests marked `browser` open. Anywhere else it installs nothing: those tests use the
# chromium that is there, or say that they are skipped because there is none.
set -eu

if [ "${CI:-}" != true ] || [ "$(id -u)" -ne 0 ] || command -v chromium >/dev/null 2>&1; then
    exit 0
fi

export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install -y --no-install-recommends chromium fonts-dejavu-core
