#!/usr/bin/env bash
# Build the second corpus: English documentation and manuals from Debian's packages, as shards of a BPE trained on it.
#
#     bash scripts/manuals_corpus.sh corpus/manuals                   # needs apt-get and dpkg-deb; 810 MB to download
#     bash scripts/manuals_corpus.sh corpus/manuals archive.tar.xz    # also pack the shards into an archive
#
# HTML pages, man pages, text, RST and POD of the packages below, one document per page, at most 6 MB per package.
# Near-copies are removed, and no held-out document has one in training (scripts/near_copies.py). DOWNLOADS: a folder
# for the packages, to keep them. Half an hour on one core.
set -euo pipefail
out=${1:?usage: manuals_corpus.sh OUT [ARCHIVE.tar.xz]}
archive=${2:-}
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
packages=(
    ada-reference-manual-2012 anarchism apache2-doc aptitude-doc-en asymptote-doc avr-libc bash-doc bind9-doc
    buildbot-doc cinder-doc clang-14-doc cmake-doc db5.3-doc debian-faq debian-handbook debian-policy
    debian-reference-en derby-doc designate-doc developers-reference docbook-xsl-doc-html dpdk-doc emacs-common
    erlang-doc exim4-doc-html ffmpeg-doc fish flex-doc fp-docs-3.2.2 freebsd-manpages gap-doc ghc-doc git-doc
    glance-doc gnome-user-docs gnumeric-doc gnuplot-doc grass-doc groff haproxy-doc harden-doc heat-doc
    imagemagick-6-doc installation-guide-amd64 ironic-doc keystone-doc kmymoney libboost1.81-doc libglib2.0-doc
    libgtk-4-doc libreoffice-help-en-us libssl-doc libvirt-doc libx11-doc lilypond-doc-html linux-doc-6.1
    llvm-14-doc mailman3-doc maint-guide manila-doc manpages manpages-dev maxima-doc mercurial-common mutt
    neutron-doc nmap nodejs-doc nova-doc ntpsec-doc octave-doc octavia-doc openjdk-17-doc openmpi-doc openssl
    perl-doc postfix-doc postgis-doc postgresql-doc-15 povray-doc python-ase-doc python-astropy-doc
    python-biopython-doc python-celery-doc python-cryptography-doc python-dask-doc python-django-doc
    python-flask-doc python-h5py-doc python-lxml-doc python-openstacksdk-doc python-pandas-doc python-scipy-doc
    python-sqlalchemy-doc python-statsmodels-doc python-sympy-doc python-tornado-doc python-xarray-doc
    python3.11-doc qtbase5-doc-html qtcreator-doc qtdeclarative5-doc-html r-doc-html racket-doc rust-doc scilab-doc
    shorewall-doc slurm-wlm-doc sphinx-doc sqlite3-doc swift-doc tcl8.6-doc twisted-doc varnish-doc vim-runtime
    wireshark-doc xen-doc xorg-docs zsh-doc
)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work" # apt downloads as another user
debs=${DOWNLOADS:-$work/debs}
if [ ! -d "$debs" ]; then
    mkdir -p "$debs"
    chmod 777 "$debs"
    (cd "$debs" && apt-get download "${packages[@]}")
fi
"$python" "$here/manuals_text.py" "$debs" "$work/all.jsonl"
"$python" "$here/near_copies.py" remove "$work/all.jsonl" "$work/manuals.jsonl"
mkdir -p "$(dirname "$out")"
out=$(cd "$(dirname "$out")" && pwd)/$(basename "$out")
# In $work, because shards record the names of their sources.
data=(--data.source jsonl --data.path manuals.jsonl)
(
    cd "$work"
    "$python" -m tercet data train-tokenizer "${data[@]}" --vocab-size 16384 --max-bytes 100000000 --out tokenizer.json
    "$python" -m tercet data prepare "${data[@]}" --data.tokenizer tokenizer.json --out "$out"
)
"$python" "$here/near_copies.py" measure "$out"
if [ -n "$archive" ]; then
    # Sorted names and fixed times make the archive reproducible; lp=1: tokens are pairs of bytes.
    tar -C "$(dirname "$out")" --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --exclude .lock \
        -cf - "$(basename "$out")" | xz --lzma2=preset=9e,dict=192MiB,nice=273,lc=3,lp=1,pb=1 > "$archive"
    ls -l "$archive"
fi
