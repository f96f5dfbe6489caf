#!/bin/sh
# Build the image with buildah, without a daemon.
#
#   deploy/build.sh [options of buildah bud]
#   BASE=debootstrap deploy/build.sh      where no registry of images is reached: the base is made of Debian's packages,
#                                         and stays as localhost/antiphon-base
#
# BASE: an image with Python 3.11 to 3.13; without it, the Dockerfile's. TAG: the image's name. BUILDAH: the command,
# with its global options. Settings of pip are given by --volume FILE:/etc/pip.conf:ro, and stay out of the image.
set -eu
cd "$(dirname "$0")/.."
BUILDAH=${BUILDAH:-buildah}
BASE=${BASE:-}
if [ "$BASE" = debootstrap ]; then
    BASE=localhost/antiphon-base
    root=$(mktemp -d)
    trap 'rm -rf "$root"' EXIT
    chmod 755 "$root"
    debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv bookworm "$root"
    rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
    made=$($BUILDAH from scratch)
    $BUILDAH add -q "$made" "$root" /
    $BUILDAH commit -q --rm "$made" "$BASE"
fi
# OCI's own format has no HEALTHCHECK.
$BUILDAH bud --format docker --layers -f deploy/Dockerfile -t "${TAG:-antiphon}" \
    ${BASE:+--build-arg "BASE=$BASE"} "$@" .
