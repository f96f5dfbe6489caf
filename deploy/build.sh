#!/bin/sh
# Build the image with buildah, without a daemon.
#
#   deploy/build.sh [options of buildah bud]
#   deploy/build.sh lock                  writes deploy/images.lock: the images of the Dockerfile and the compose file,
#                                         with digests that skopeo gets from their registries. Builds use the file if it
#                                         exists
#   BASE=debootstrap deploy/build.sh      needs no image registry: builds the base from Debian's packages, and keeps it
#                                         as localhost/antiphon-base
#
# BASE: an image with Python 3.11 to 3.13; the default is that of deploy/images.lock, or else of the Dockerfile. TAG:
# the image's name. BUILDAH, SKOPEO: the commands, with their global options. Pass settings of pip by --volume
# FILE:/etc/pip.conf:ro, which keeps them out of the image.
set -eu
cd "$(dirname "$0")/.."
BUILDAH=${BUILDAH:-buildah}
SKOPEO=${SKOPEO:-skopeo}
BASE=${BASE:-}
IMAGES=${IMAGES:-deploy/images.lock}
named=$(sed -n 's/^ARG BASE=\(.*\)$/\1/p' deploy/Dockerfile)
if [ "${1:-}" = lock ]; then
    # Replaces the file only when it is complete: an image that it lacks would be used by its tag.
    {
        echo "# Written by \`deploy/build.sh lock\`; for \`docker compose --env-file\`, too."
        {
            echo "BASE_IMAGE $named"
            sed -n 's/.*image: *${\([A-Z_]*_IMAGE\):-\([^}]*\)}.*/\1 \2/p' deploy/compose.yaml
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
# The OCI format has no HEALTHCHECK.
$BUILDAH bud --format docker --layers -f deploy/Dockerfile -t "${TAG:-antiphon:$version}" \
    ${BASE:+--build-arg "BASE=$BASE"} "$@" .
