"""A cluster for the tests of a file, and a database for each."""

from support.spark import cluster_loads

cluster, engine, gate = cluster_loads.cluster, cluster_loads.engine, cluster_loads.gate
