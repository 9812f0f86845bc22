"""Take events over HTTP: a server inside the connector, which answers 200 once they are on disk."""

from penstock.connectors.webhook.config import WebhookConfig
from penstock.connectors.webhook.source import Webhook

__all__ = ["Webhook", "WebhookConfig"]
