"""A client of PostgreSQL for the connectors that talk to one: options, connections, failures, types."""
