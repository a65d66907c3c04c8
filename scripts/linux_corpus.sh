#!/usr/bin/env bash
# Build a large offline corpus: C sources of the Linux kernel as byte shards, from Debian's package.
#
#     bash scripts/linux_corpus.sh corpus/linux              # needs apt-get, dpkg-deb, tar, xz; a minute, 1 GB of disk
#
# One document per file: *.c and *.h in the folders below, up to 300 KiB (larger files are register tables).
set -euo pipefail
out=${1:?usage: linux_corpus.sh OUT}
version=6.1.190-1  # mirrors keep the last few: `apt-cache madison linux-source-6.1` lists them
folders=(block crypto fs init io_uring ipc kernel lib mm net security virt
         drivers/md drivers/net drivers/pci drivers/tty drivers/usb)
python=${PYTHON:-python3}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"  # apt downloads as another user
(cd "$work" && apt-get download "linux-source-6.1=$version" && dpkg-deb -x linux-source-6.1_*.deb deb)
sources=$work/deb/usr/src/linux-source-6.1.tar.xz
tar -xJf "$sources" -C "$work" "${folders[@]/#/linux-source-6.1/}"
tree=$work/linux-source-6.1
find "$tree" -type f ! -name '*.[ch]' -delete
find "$tree" -type f -size +300k -delete

"$python" -m tercet data prepare --data.source text --data.path "$tree" --data.tokenizer byte --data.bad_records skip --out "$out"
