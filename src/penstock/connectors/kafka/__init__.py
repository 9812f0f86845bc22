"""Kafka: topics as ranges of offsets, and a sink that writes in transactions."""
