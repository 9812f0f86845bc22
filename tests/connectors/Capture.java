import io.apicurio.registry.utils.converter.AvroConverter;
import io.debezium.embedded.Connect;
import io.debezium.engine.DebeziumEngine;
import io.debezium.engine.RecordChangeEvent;
import io.debezium.engine.format.ChangeEventFormat;
import java.util.HashMap;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.ByteArraySerializer;
import org.apache.kafka.connect.json.JsonConverter;
import org.apache.kafka.connect.source.SourceRecord;
import org.apache.kafka.connect.storage.Converter;

/**
 * Debezium itself: it captures tables of PostgreSQL and writes their changes to Kafka, as Kafka Connect does with the same
 * converters, until its input ends.
 */
public class Capture {
    public static void main(String[] arguments) throws Exception {
        String how = arguments[0], brokers = arguments[1], registry = arguments[2], topics = arguments[3];
        Properties settings = new Properties();
        settings.put("name", "capture");
        settings.put("connector.class", "io.debezium.connector.postgresql.PostgresConnector");
        settings.put("offset.storage", "org.apache.kafka.connect.storage.MemoryOffsetBackingStore");
        settings.put("plugin.name", "pgoutput");
        settings.put("publication.autocreate.mode", "filtered");
        settings.put("slot.drop.on.stop", "true");
        settings.put("topic.prefix", topics);
        for (int at = 4; at < arguments.length; at++) {
            String[] pair = arguments[at].split("=", 2);
            settings.put(pair[0], pair[1]);
        }
        Converter keys = converter(how, registry, true), values = converter(how, registry, false);
        try (KafkaProducer<byte[], byte[]> producer =
                new KafkaProducer<>(Map.of("bootstrap.servers", brokers), new ByteArraySerializer(), new ByteArraySerializer())) {
            DebeziumEngine<RecordChangeEvent<SourceRecord>> engine =
                DebeziumEngine.create(ChangeEventFormat.of(Connect.class))
                    .using(settings)
                    .using((success, message, error) -> System.err.println("ended: " + message + " " + error))
                    .notifying(event -> send(producer, keys, values, event.record()))
                    .build();
            ExecutorService thread = Executors.newSingleThreadExecutor();
            thread.execute(engine);
            while (System.in.read() >= 0) {}
            engine.close();
            thread.shutdown();
        }
        System.exit(0);
    }

    static void send(KafkaProducer<byte[], byte[]> producer, Converter keys, Converter values, SourceRecord record) {
        byte[] key = keys.fromConnectData(record.topic(), record.keySchema(), record.key());
        byte[] value = values.fromConnectData(record.topic(), record.valueSchema(), record.value());
        producer.send(new ProducerRecord<>(record.topic(), key, record.value() == null ? null : value));
    }

    static Converter converter(String how, String registry, boolean isKey) {
        Converter made = how.equals("avro") ? new AvroConverter<>() : new JsonConverter();
        Map<String, Object> settings = new HashMap<>();
        settings.put("schemas.enable", how.equals("json with schemas"));
        settings.put("apicurio.registry.url", registry);
        settings.put("apicurio.registry.auto-register", true);
        settings.put("apicurio.registry.as-confluent", true);
        settings.put("apicurio.registry.use-id", "contentId");
        settings.put("apicurio.registry.headers.enabled", false);
        made.configure(settings, isKey);
        return made;
    }
}
