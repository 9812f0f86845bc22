import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.google.protobuf.CodedInputStream;
import com.google.protobuf.DescriptorProtos.FileDescriptorProto;
import com.google.protobuf.Descriptors.Descriptor;
import com.google.protobuf.Descriptors.FileDescriptor;
import com.google.protobuf.DynamicMessage;
import com.google.protobuf.TextFormat;
import io.apicurio.registry.serde.avro.AvroKafkaDeserializer;
import io.apicurio.registry.serde.avro.AvroKafkaSerializer;
import io.apicurio.registry.serde.jsonschema.JsonSchemaKafkaDeserializer;
import io.apicurio.registry.serde.jsonschema.JsonSchemaKafkaSerializer;
import java.io.ByteArrayOutputStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.avro.Schema;
import org.apache.avro.generic.GenericDatumReader;
import org.apache.avro.generic.GenericDatumWriter;
import org.apache.avro.generic.GenericRecord;
import org.apache.avro.io.DecoderFactory;
import org.apache.avro.io.EncoderFactory;
import org.apache.avro.io.JsonEncoder;
import org.apache.kafka.clients.consumer.ConsumerConfig;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerConfig;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.Deserializer;
import org.apache.kafka.common.serialization.Serializer;

/**
 * Java's own client and serialisers beside Penstock's: `write` takes rows from a file, one in JSON per line, `read` prints as many
 * as are asked for. The schema is the one that the registry holds for the topic; its text is in a file too, for rows as JSON.
 */
public class Serialisers {
    static final ObjectMapper JSON = new ObjectMapper();
    static final int PREFIX = 5; // 0, and the id of the schema

    public static void main(String[] arguments) throws Exception {
        String kind = arguments[0], action = arguments[1], brokers = arguments[2], registry = arguments[3], topic = arguments[4];
        String schema = Files.readString(Path.of(arguments[5]));
        Map<String, Object> settings = new HashMap<>();
        settings.put("apicurio.registry.url", registry);
        settings.put("apicurio.registry.as-confluent", true);
        settings.put("apicurio.registry.use-id", "contentId");
        settings.put("apicurio.registry.headers.enabled", false);
        settings.put("apicurio.registry.find-latest", true);
        settings.put(ConsumerConfig.BOOTSTRAP_SERVERS_CONFIG, brokers);
        if (action.equals("write")) {
            write(kind, settings, topic, schema, Files.readAllLines(Path.of(arguments[6])));
        } else {
            read(kind, settings, topic, schema, Integer.parseInt(arguments[6]));
        }
    }

    static void write(String kind, Map<String, Object> settings, String topic, String schema, List<String> rows) throws Exception {
        Serializer<?> serialiser = kind.equals("avro") ? new AvroKafkaSerializer<GenericRecord>() : new JsonSchemaKafkaSerializer<JsonNode>();
        serialiser.configure(settings, false);
        try (KafkaProducer<byte[], Object> producer = producer(settings, serialiser)) {
            for (String row : rows) {
                producer.send(new ProducerRecord<>(topic, kind.equals("avro") ? record(schema, row) : JSON.readTree(row))).get();
            }
        }
    }

    @SuppressWarnings("unchecked")
    static KafkaProducer<byte[], Object> producer(Map<String, Object> settings, Serializer<?> values) {
        return new KafkaProducer<>(
            Map.of(ProducerConfig.BOOTSTRAP_SERVERS_CONFIG, settings.get(ProducerConfig.BOOTSTRAP_SERVERS_CONFIG)),
            new org.apache.kafka.common.serialization.ByteArraySerializer(),
            (Serializer<Object>) values);
    }

    static void read(String kind, Map<String, Object> settings, String topic, String schema, int count) throws Exception {
        settings.put(ConsumerConfig.ISOLATION_LEVEL_CONFIG, "read_committed");
        Deserializer<?> deserialiser =
            switch (kind) {
                case "avro" -> new AvroKafkaDeserializer<GenericRecord>();
                case "json_schema" -> new JsonSchemaKafkaDeserializer<JsonNode>();
                default -> new ByteArrayDeserializer();
            };
        deserialiser.configure(settings, false);
        try (KafkaConsumer<byte[], ?> consumer = new KafkaConsumer<>(settings, new ByteArrayDeserializer(), deserialiser)) {
            consumer.assign(consumer.partitionsFor(topic).stream().map(each -> new TopicPartition(topic, each.partition())).toList());
            consumer.seekToBeginning(consumer.assignment());
            while (count > 0) {
                for (ConsumerRecord<byte[], ?> each : consumer.poll(Duration.ofSeconds(1))) {
                    System.out.println(shown(kind, schema, each.value()));
                    count--;
                }
            }
        }
    }

    static String shown(String kind, String schema, Object value) throws Exception {
        if (value instanceof GenericRecord row) {
            ByteArrayOutputStream text = new ByteArrayOutputStream();
            JsonEncoder encoder = EncoderFactory.get().jsonEncoder(row.getSchema(), text);
            new GenericDatumWriter<GenericRecord>(row.getSchema()).write(row, encoder);
            encoder.flush();
            return text.toString("UTF-8");
        }
        if (value instanceof byte[] message) { // Apicurio's own frame of Protobuf is another: this one is read by hand
            CodedInputStream rest = CodedInputStream.newInstance(message, PREFIX, message.length - PREFIX);
            FileDescriptor file = file(schema);
            int depth = rest.readSInt32();
            Descriptor type = file.getMessageTypes().get(depth == 0 ? 0 : rest.readSInt32());
            for (; depth > 1; depth--) {
                type = type.getNestedTypes().get(rest.readSInt32());
            }
            return JSON.writeValueAsString(TextFormat.printer().escapingNonAscii(false).shortDebugString(DynamicMessage.parseFrom(type, rest)));
        }
        return JSON.writeValueAsString(value);
    }

    static GenericRecord record(String schema, String row) throws Exception {
        Schema parsed = new Schema.Parser().parse(schema);
        return new GenericDatumReader<GenericRecord>(parsed).read(null, DecoderFactory.get().jsonDecoder(parsed, row));
    }

    static FileDescriptor file(String descriptor) throws Exception {
        FileDescriptorProto file = FileDescriptorProto.parseFrom(Base64.getDecoder().decode(descriptor.trim()));
        return FileDescriptor.buildFrom(file, new FileDescriptor[0]);
    }
}
