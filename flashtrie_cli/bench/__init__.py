"""Workloads, baselines, statistics, export, comparison, plots."""
