# Sourced by lab.sh and build.sh.
cache=${KERNELSWAP_LAB_CACHE:-/var/cache/kernelswap}

note() { echo "lab: $*" >&2; }

fail() { # fail WHAT [WHAT TO DO]
  note "$1${2:+; $2}"
  exit 1
}

need_root() {
  [ "$EUID" = 0 ] || fail "the lab boots hosts in namespaces and so needs root" "run it with sudo"
  # Overlayfs reads these paths in a list with its own separators.
  case $cache${lab-} in *[!A-Za-z0-9._/@+-]*) fail "the lab's folders ($cache ${lab-}) may only hold letters, digits and . _ - + @" ;; esac
}

need() { # need TOOL:PACKAGE[,PACKAGE] ...
  local pair missing=()
  for pair in "$@"; do
    command -v "${pair%%:*}" >/dev/null || missing+=("${pair#*:}")
  done
  if [ ${#missing[@]} -gt 0 ]; then install_packages "${missing[@]}"; fi
}

install_packages() {
  local packages
  packages=$(tr ', ' '\n\n' <<<"$*" | sort -u | tr '\n' ' ')
  command -v apt-get >/dev/null || fail "missing here: $packages" "install what your distribution calls these"
  note "installing $packages"
  # shellcheck disable=SC2086
  { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $packages; } >&2 ||
    fail "cannot install $packages"
}
