"""AWS on this machine: moto's server."""
