from setuptools import find_packages, setup

setup(
    packages=find_packages(include=["fastsched", "fastsched.*"]) + ["fastsched_kernels"],
    package_dir={"fastsched_kernels": "kernels/fastsched_kernels"},
    package_data={"fastsched": ["presets/*.yaml"]},
)
