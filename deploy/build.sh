#!/bin/sh
# Build the image with buildah, without a daemon.
#
#   deploy/build.sh [options of buildah bud]
#   deploy/build.sh lock                  writes deploy/images.lock: the images of the Dockerfile and the compose file,
#                                         with the digests that skopeo asks their registries for. It is used where it is
#   BASE=debootstrap deploy/build.sh      where no registry of images is reached: the base is made of Debian's packages,
#                                         and stays as localhost/antiphon-base
#
# BASE: an image with Python 3.11 to 3.13; without it, that of deploy/images.lock or the Dockerfile's. TAG: the image's
# name. BUILDAH, SKOPEO: the commands, with their global options. Settings of pip are given by
# --volume FILE:/etc/pip.conf:ro, and stay out of the image.
set -eu
cd "$(dirname "$0")/.."
BUILDAH=${BUILDAH:-buildah}
SKOPEO=${SKOPEO:-skopeo}
BASE=${BASE:-}
IMAGES=${IMAGES:-deploy/images.lock}
named=$(sed -n 's/^ARG BASE=\(.*\)$/\1/p' deploy/Dockerfile)
if [ "${1:-}" = lock ]; then
    # Whole or not at all: a file that lacks an image would have it by its tag.
    {
        echo "# Written by \`deploy/build.sh lock\`; for \`docker compose --env-file\`, too."
        {
            echo "BASE_IMAGE $named"
            sed -n 's/.*image: *${\([A-Z]*_IMAGE\):-\([^}]*\)}.*/\1 \2/p' deploy/compose.yaml
        } | while read -r variable image; do
            digest=$($SKOPEO inspect --no-tags --format '{{.Digest}}' "docker://$image")
            case $digest in
                sha256:????????????????????????????????????????????????????????????????) ;;
                *) echo "$image has no digest: $digest" >&2 && exit 1 ;;
            esac
            echo "$variable=$image@$digest"
        done
    } > "$IMAGES.part" || { rm -f "$IMAGES.part"; exit 1; }
    mv "$IMAGES.part" "$IMAGES"
    exit
fi
if [ -z "$BASE" ] && [ -f "$IMAGES" ]; then
    BASE=$(sed -n 's/^BASE_IMAGE=//p' "$IMAGES")
    case $BASE in
        "$named"@sha256:*) ;;
        *) echo "$IMAGES has another base than the Dockerfile's $named: deploy/build.sh lock" >&2 && exit 1 ;;
    esac
fi
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
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
# OCI's own format has no HEALTHCHECK.
$BUILDAH bud --format docker --layers -f deploy/Dockerfile -t "${TAG:-antiphon:$version}" \
    ${BASE:+--build-arg "BASE=$BASE"} "$@" .
