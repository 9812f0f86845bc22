"""Messages of an MQTT broker, in and out."""

from penstock.connectors.mqtt.sink import MqttSink
from penstock.connectors.mqtt.source import Mqtt

__all__ = ["Mqtt", "MqttSink"]
