"""Ask a web API for records, page by page."""

from penstock.connectors.http_poll.config import HttpPollConfig
from penstock.connectors.http_poll.source import HttpPoll

__all__ = ["HttpPoll", "HttpPollConfig"]
