"""Checks that dependencies are locked, have allowed licences, and no known security holes.

Usage: python tools/supply_chain.py AUDIT_BIN SBOM. AUDIT_BIN is the folder of the audit programs,
SBOM the file to which the software bill of materials is written.

`make check` runs this in the development environment. Each finding is printed as one line. Packages
whose advisories cannot be looked up are listed, but are no findings.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
LOCK = "requirements.lock"
EXTRA = "dev"  # the lock file is made for this extra, which includes the extras for users
# Packages that are not locked, because each kind of machine has a build with another hash; see
# tools/lock.in.
UNLOCKED = frozenset({"torch"})
# Before adding a licence here, decide whether the project may depend on packages under this
# licence.
LICENCES = (
    "0BSD;Apache;BSD;BSL-1.0;CC0-1.0;CNRI-Python;ISC;LLVM-exception;MIT;MPL;"
    "Mozilla Public License;PSF;Python Software Foundation;Zlib"
)

_PIN = re.compile(r"^(?P<name>[\w.-]+)==(?P<version>[^\s;]+)(?: ; (?P<marker>.+?))? \\$")
_HASH = re.compile(r"^    --hash=sha256:[0-9a-f]{64}")

Pins = Mapping[str, list[Version]]


def read_lock(text: str) -> dict[str, list[Version]]:
    """Return the versions of each locked package: one, or one per Python version.

    Raises ValueError for a pin that has no hash.
    """
    pins: dict[str, list[Version]] = {}
    lines = text.splitlines()
    for number, line in enumerate(lines):
        found = _PIN.match(line)
        if found is None:
            continue
        if number + 1 == len(lines) or not _HASH.match(lines[number + 1]):
            raise ValueError(f"{found['name']} has no hash")
        pins.setdefault(canonicalize_name(found["name"]), []).append(Version(found["version"]))
    return pins


def requirements_of(project: Mapping[str, Any], extra: str) -> Iterator[Requirement]:
    """Yield a project's requirements with an extra, and with the extras that this extra names."""
    yield from map(Requirement, project["dependencies"])
    yield from _requirements_of_extra(project, extra)


def _requirements_of_extra(project: Mapping[str, Any], extra: str) -> Iterator[Requirement]:
    for requirement in map(Requirement, project["optional-dependencies"][extra]):
        if requirement.name != project["name"]:
            yield requirement
            continue
        for inner in sorted(requirement.extras):
            yield from _requirements_of_extra(project, inner)


def lock_findings(pyproject: Mapping[str, Any], pins: Pins) -> Iterator[str]:
    """Yield a line for each requirement of the project that the lock file does not meet."""
    for requirement in requirements_of(pyproject["project"], EXTRA):
        name = canonicalize_name(requirement.name)
        if name in UNLOCKED:
            continue
        versions = pins.get(name, [])
        if not versions or not all(requirement.specifier.contains(v) for v in versions):
            held = ", ".join(map(str, versions)) or "nothing"
            yield f"{LOCK}: holds {held} for {requirement}; run `make lock`"


def licence_findings(audit_bin: Path) -> Iterator[str]:
    """Yield a line about installed packages under licences that `LICENCES` does not contain."""
    command = [
        *(str(audit_bin / "pip-licenses"), "--python", sys.executable, "--from", "mixed"),
        *("--with-system", "--partial-match", "--allow-only", LICENCES),
        *("--ignore-packages", "baton-serve"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        yield f"licence: {result.stderr.strip() or result.stdout.strip()}"


def known_holes(audit_bin: Path) -> tuple[list[str], int, int]:
    """Look up the advisories on all locked packages.

    Returns:
        The findings, the number of packages that were looked up, and the number of packages without
        an answer (-1: all).
    """
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [str(audit_bin / "pip-audit"), "--requirement", LOCK, "--disable-pip"]
        command += ["--require-hashes", "--progress-spinner", "off", "--format", "json"]
        result = subprocess.run(
            [*command, "--output", report.name],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        text = Path(report.name).read_text(encoding="utf-8")
    if not text:  # no registry answers
        print(f"advisories: {(result.stderr.strip().splitlines() or ['no answer'])[-1]}")
        return [], 0, -1
    packages = json.loads(text)["dependencies"]
    skipped = sum("skip_reason" in package for package in packages)
    findings = [
        f"{package['name']} {package['version']}: {hole['id']} (fixed in {hole['fix_versions']})"
        for package in packages
        for hole in package.get("vulns", ())
    ]
    return findings, len(packages) - skipped, skipped


def write_sbom(audit_bin: Path, path: Path) -> Iterator[str]:
    """Write a CycloneDX list of installed packages; yield a finding if it is nearly empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [str(audit_bin / "cyclonedx-py"), "environment", sys.executable]
    command += ["--pyproject", "pyproject.toml", "--output-reproducible", "--of", "JSON"]
    subprocess.run([*command, "--output-file", str(path)], cwd=ROOT, check=True)
    listed = {canonicalize_name(c["name"]) for c in json.loads(path.read_text())["components"]}
    if "torch" not in listed or len(listed) < 20:
        yield f"sbom: {path} lists only {len(listed)} packages"


def main(audit_bin: Path, sbom: Path) -> int:
    """Print every finding; returns the exit code."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    pins = read_lock((ROOT / LOCK).read_text(encoding="utf-8"))
    holes, num_audited, num_skipped = known_holes(audit_bin)
    findings = [
        *lock_findings(pyproject, pins),
        *licence_findings(audit_bin),
        *holes,
        *write_sbom(audit_bin, sbom),
    ]
    for finding in findings:
        print(finding)
    print(
        f"{LOCK}: {len(pins)} packages with hashes; advisories looked up for {num_audited}"
        + (f", not to be had here for {num_skipped}" if num_skipped else "")
        + f"; SBOM in {sbom}"
    )
    return 1 if findings else 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), Path(sys.argv[2])))
