#!/usr/bin/env bash
# Make a release of the last commit in dist/: wheel, sdist, the components of an installation (CycloneDX) and where all
# of it comes from (an in-toto statement with SLSA's provenance). The wheel is built twice, installed and tried.
# RELEASE_BUILDER: a URI of who builds, for the provenance.
set -euo pipefail
cd "$(dirname "$0")/.."
umask 022
tools=(build==1.6.1 cyclonedx-bom==7.5.0 setuptools==84.2.1 twine==7.0.0)

[ -z "$(git status --porcelain)" ] || { echo "uncommitted changes: a release is made of a commit" >&2; exit 1; }
version="$(sed -n 's/^VERSION = "\(.*\)"$/\1/p' private_llm/config.py)"
grep -qx "## $version" CHANGELOG.md || { echo "CHANGELOG.md: want a section '## $version'" >&2; exit 1; }
wheel="private_llm-$version-py3-none-any.whl"
commit="$(git rev-parse HEAD)"
SOURCE_DATE_EPOCH="$(git log -1 --format=%ct)"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
export SOURCE_DATE_EPOCH

echo "building $version of $commit ..."
mkdir -p dist "$work/source"
rm -f dist/private_llm-"$version"*
git archive HEAD | tar -x --no-same-permissions -C "$work/source"
python3 -m venv "$work/tools"
"$work/tools/bin/pip" install --quiet --disable-pip-version-check "${tools[@]}"
printf '%s\n' "${tools[@]}" >"$work/pins"
for out in dist "$work/again"; do # an environment of its own each time
  PIP_CONSTRAINT="$work/pins" "$work/tools/bin/python" -m build --outdir "$out" "$work/source" >"$work/log" 2>&1 || {
    cat "$work/log"
    exit 1
  }
done
cmp "dist/$wheel" "$work/again/$wheel"
"$work/tools/bin/twine" check --strict "dist/$wheel" "dist/private_llm-$version.tar.gz"

echo "installing and trying it ..."
python3 -m venv "$work/env"
pip=("$work/env/bin/pip" install --quiet --disable-pip-version-check -c constraints.txt)
command -v nvidia-smi >/dev/null || "${pip[@]}" "$(grep '^torch==' constraints.txt)+cpu" || echo "no CPU build of PyTorch there"
"${pip[@]}" "dist/$wheel[gateway,hosting]"
(
  cd "$work"
  unset PYTHONPATH
  [ "$(env/bin/private-llm --version)" = "$version" ]
  env/bin/private-llm docs errors >docs
  HF_HUB_OFFLINE=1 env/bin/private-llm demo --tiny
)
"$work/tools/bin/cyclonedx-py" environment --pyproject pyproject.toml --output-reproducible --of JSON \
  -o "dist/private_llm-$version.cdx.json" "$work/env/bin/python"

python3 - "$commit" "$version" "${tools[@]}" <<'PYTHON'
import hashlib, json, os, pathlib, platform, sys

commit, version, *tools = sys.argv[1:]
def digest(path):
    return {"sha256": hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()}
parts = pathlib.Path(f"dist/private_llm-{version}.cdx.json")
named = json.loads(parts.read_text()) # its version is in no file that cyclonedx-py reads
named["metadata"]["component"] |= {"version": version, "purl": f"pkg:pypi/private-llm@{version}"}
parts.write_text(json.dumps(named, indent=2) + "\n")
made = sorted(pathlib.Path("dist").glob(f"private_llm-{version}*"))
statement = {
    "_type": "https://in-toto.io/Statement/v1",
    "subject": [{"name": path.name, "digest": digest(path)} for path in made],
    "predicateType": "https://slsa.dev/provenance/v1",
    "predicate": {
        "buildDefinition": {
            "buildType": "urn:private-llm:scripts/release.sh",
            "externalParameters": {"version": version},
            "internalParameters": {
                "SOURCE_DATE_EPOCH": os.environ["SOURCE_DATE_EPOCH"],
                "python": platform.python_version(),
                "tools": tools,
            },
            "resolvedDependencies": [
                {"name": "source", "digest": {"gitCommit": commit}},
                {"name": "constraints.txt", "digest": digest("constraints.txt")},
            ],
        },
        "runDetails": {"builder": {"id": os.environ.get("RELEASE_BUILDER", "urn:private-llm:unnamed-builder")}},
    },
}
pathlib.Path(f"dist/private_llm-{version}.intoto.json").write_text(json.dumps(statement, indent=2) + "\n")
PYTHON
ls -l dist
