#!/usr/bin/env bash
# Download the public sources of the tasks that cannot be generated.
#
#   bash scripts/get_data.sh [--help]                              say what there is, fetch nothing
#   bash scripts/get_data.sh DIR [text|image|release|all]          default: all
#
# A broken download goes on where it stopped. A file appears under its own name only when it is
# whole; one with the wrong checksum is kept beside it as *.bad. The text and image archives are
# read as they are, so nothing is unpacked. For a mirror set LRA_TEXT_URL, LRA_IMAGE_URL or
# LRA_RELEASE_URL to the address of the folder that has the file (and, for a file of other content,
# LRA_TEXT_MD5, LRA_IMAGE_MD5 or LRA_RELEASE_MD5).
set -euo pipefail

usage() {
  cat <<'EOF'
Nothing is fetched without a folder. What there is:

  text      84 MB  aclImdb_v1.tar.gz       IMDb reviews; read as it is
  image    170 MB  cifar-10-python.tar.gz  CIFAR-10 pictures; read as it is
  release    8 GB  lra_release.gz          Long Range Arena, for retrieval; 18.6 GB unpacked, and
                                           its server often refuses to hand it out
  all      8.3 GB  all of these

ListOps, Pathfinder and Path-X need no download: they are generated. To fetch into the folder data:

  bash scripts/get_data.sh data text
EOF
}

case ${1--h} in
  -h | --help)
    usage
    exit 0
    ;;
  -* | "" | text | image | release | retrieval | all) # ./text is a folder of such a name
    echo "'$1': expected a folder first, as in: bash scripts/get_data.sh data text" >&2
    exit 2
    ;;
esac

if [ $# -gt 2 ]; then
  echo "'$3': expected nothing behind '$2'; call once for each, or with all" >&2
  exit 2
fi
if ! command -v curl > /dev/null; then
  echo "curl is not installed, which downloads need" >&2
  exit 2
fi

dir=$1
what=${2-all}

text_url=${LRA_TEXT_URL:-https://ai.stanford.edu/~amaas/data/sentiment}
text_md5=${LRA_TEXT_MD5:-7c2ac02c03563afcf9b574c7e56c153a}
image_url=${LRA_IMAGE_URL:-https://www.cs.toronto.edu/~kriz}
image_md5=${LRA_IMAGE_MD5:-c58f30108f718f92721af3b95e74349a}
release_url=${LRA_RELEASE_URL:-https://storage.googleapis.com/long-range-arena}
limits=(--connect-timeout 20 --speed-limit 1 --speed-time 60) # a minute without a byte is an error
release_md5=${LRA_RELEASE_MD5:-} # none is published; the file must begin as gzip does, 1f8b

md5() {
  if command -v md5sum > /dev/null; then md5sum < "$1"; else command md5 -q "$1"; fi | cut -c 1-32
}

# download URL PART [OPTION...]: sets status to curl's exit code, and code to the server's answer.
download() {
  status=0
  code=$(curl -fL --retry 3 "${limits[@]}" "${@:3}" -w '%{http_code}' -o "$2" "$1") || status=$?
}

# fetch NAME URL MD5: get URL/NAME into $dir; an empty MD5 is not compared.
fetch() {
  local name=$1 url=$2 expected=$3 is found status code
  local file=$dir/$name part=$dir/$name.part
  if [ -e "$file" ]; then
    if [ -n "$expected" ] && [ "$(md5 "$file")" != "$expected" ]; then
      echo "$file: wrong checksum; move it away and run this again" >&2
      return 1
    fi
    echo "$file: already there"
    return 0
  fi
  mkdir -p "$dir"
  # A download that was stopped just before its renaming is whole already.
  if [ ! -e "$part" ] || [ -z "$expected" ] || [ "$(md5 "$part")" != "$expected" ]; then
    echo "$file: from $url/$name"
    download "$url/$name" "$part" -C -
    # 416: the file does not go on behind this part, which is whole or of another file.
    if [ "$code" = 416 ] && [ -z "$expected" ] && gzip -t "$part" 2> /dev/null; then
      status=0
    elif [ "$code" = 416 ] || [ "$status" -eq 33 ]; then # 33: this server cannot continue a file
      echo "$part: cannot be continued; starting anew"
      rm -f "$part"
      download "$url/$name" "$part"
    fi
    if [ "$status" -ne 0 ]; then
      echo "$file: download failed (curl exit code $status); run this again to go on" >&2
      return 1
    fi
  fi
  if [ -n "$expected" ]; then
    is="checksum" found=$(md5 "$part")
  else # at least not a page that says sorry
    is="no gzip file, it begins with" expected=1f8b
    found=$(head -c 2 "$part" | od -An -tx1 | tr -d ' \n')
  fi
  if [ "$found" != "$expected" ]; then
    mv -f "$part" "$file.bad"
    echo "$file: $is $found, expected $expected; kept as $file.bad" >&2
    return 1
  fi
  mv "$part" "$file"
}

get_text() { fetch aclImdb_v1.tar.gz "$text_url" "$text_md5"; }

get_image() { fetch cifar-10-python.tar.gz "$image_url" "$image_md5"; }

get_release() {
  if fetch lra_release.gz "$release_url" "$release_md5"; then
    echo "$dir/lra_release.gz is a tar archive; unpack it (18.6 GB) with:"
    echo "  tar -xzf $dir/lra_release.gz -C $dir"
    return 0
  fi
  cat >&2 <<EOF
The release of Long Range Arena (lra_release.gz, 8 GB) is not open to everyone: its server often
answers 403. It is needed for retrieval only; ListOps, Pathfinder and Path-X are generated here. If
you have a copy, either
  - unpack it: tar -xzf lra_release.gz -C $dir
  - or put new_aan_pairs.train.tsv, .eval.tsv and .test.tsv into $dir/tsv_data
  - or set LRA_RELEASE_URL to the address of a folder that has lra_release.gz.
task=retrieval task.source=synthetic runs without it, on stand-in data.
EOF
  return 1
}

case $what in
  text) get_text ;;
  image) get_image ;;
  release) get_release ;;
  all)
    failed=0
    get_text || failed=1
    get_image || failed=1
    get_release || failed=1
    exit $failed
    ;;
  *)
    echo "unknown: '$what'; expected text, image, release (for retrieval) or all" >&2
    exit 2
    ;;
esac
