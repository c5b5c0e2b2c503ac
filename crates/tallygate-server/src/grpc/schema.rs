//! The messages and services of the gRPC listener, as reflection describes them: `google.protobuf.FileDescriptorProto`.
//!
//! Files have the names that they have in their projects, with the messages that this server uses.

use crate::envoy::wire;

/// The services of the listener.
pub(super) const SERVICES: &[&str] = &[
    "envoy.service.ratelimit.v3.RateLimitService",
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
];

/// A file of message definitions.
pub(super) struct File {
    pub(super) name: &'static str,
    package: &'static str,
    pub(super) depends: &'static [&'static str],
    messages: &'static [Message],
    enums: &'static [Enum],
    services: &'static [Service],
}

struct Message {
    name: &'static str,
    fields: &'static [Field],
    messages: &'static [Self],
    enums: &'static [Enum],
    /// The names of its groups of fields of which one is set.
    oneofs: &'static [&'static str],
    is_map_entry: bool,
}

struct Field {
    name: &'static str,
    number: u32,
    kind: Kind,
    is_list: bool,
    oneof: Option<u64>,
}

#[derive(Clone, Copy)]
enum Kind {
    Double,
    Float,
    Int64,
    Uint64,
    Int32,
    Bool,
    Text,
    Message(&'static str),
    Bytes,
    Uint32,
    Enum(&'static str),
}

struct Enum {
    name: &'static str,
    values: &'static [(&'static str, u64)],
}

struct Service {
    name: &'static str,
    methods: &'static [Method],
}

struct Method {
    name: &'static str,
    input: &'static str,
    output: &'static str,
    is_client_streaming: bool,
    is_server_streaming: bool,
}

const NO_MESSAGE: Message =
    Message { name: "", fields: &[], messages: &[], enums: &[], oneofs: &[], is_map_entry: false };

const fn field(name: &'static str, number: u32, kind: Kind) -> Field {
    Field { name, number, kind, is_list: false, oneof: None }
}

const fn list(name: &'static str, number: u32, kind: Kind) -> Field {
    Field { is_list: true, ..field(name, number, kind) }
}

const fn one_of(name: &'static str, number: u32, kind: Kind) -> Field {
    Field { oneof: Some(0), ..field(name, number, kind) }
}

const fn wrapper(name: &'static str, fields: &'static [Field]) -> Message {
    Message { name, fields, ..NO_MESSAGE }
}

const UNITS: &[(&str, u64)] = &[
    ("UNKNOWN", 0),
    ("SECOND", 1),
    ("MINUTE", 2),
    ("HOUR", 3),
    ("DAY", 4),
    ("MONTH", 5),
    ("YEAR", 6),
    ("WEEK", 7),
];

/// The two versions of reflection have the same messages in different packages.
macro_rules! reflection_file {
    ($file:literal, $package:literal) => {
        File {
            name: $file,
            package: $package,
            depends: &[],
            messages: &[
                Message {
                    name: "ServerReflectionRequest",
                    fields: &[
                        field("host", 1, Kind::Text),
                        one_of("file_by_filename", 3, Kind::Text),
                        one_of("file_containing_symbol", 4, Kind::Text),
                        one_of(
                            "file_containing_extension",
                            5,
                            Kind::Message(concat!(".", $package, ".ExtensionRequest")),
                        ),
                        one_of("all_extension_numbers_of_type", 6, Kind::Text),
                        one_of("list_services", 7, Kind::Text),
                    ],
                    oneofs: &["message_request"],
                    ..NO_MESSAGE
                },
                Message {
                    name: "ExtensionRequest",
                    fields: &[
                        field("containing_type", 1, Kind::Text),
                        field("extension_number", 2, Kind::Int32),
                    ],
                    ..NO_MESSAGE
                },
                Message {
                    name: "ServerReflectionResponse",
                    fields: &[
                        field("valid_host", 1, Kind::Text),
                        field(
                            "original_request",
                            2,
                            Kind::Message(concat!(".", $package, ".ServerReflectionRequest")),
                        ),
                        one_of(
                            "file_descriptor_response",
                            4,
                            Kind::Message(concat!(".", $package, ".FileDescriptorResponse")),
                        ),
                        one_of(
                            "all_extension_numbers_response",
                            5,
                            Kind::Message(concat!(".", $package, ".ExtensionNumberResponse")),
                        ),
                        one_of(
                            "list_services_response",
                            6,
                            Kind::Message(concat!(".", $package, ".ListServiceResponse")),
                        ),
                        one_of(
                            "error_response",
                            7,
                            Kind::Message(concat!(".", $package, ".ErrorResponse")),
                        ),
                    ],
                    oneofs: &["message_response"],
                    ..NO_MESSAGE
                },
                Message {
                    name: "FileDescriptorResponse",
                    fields: &[list("file_descriptor_proto", 1, Kind::Bytes)],
                    ..NO_MESSAGE
                },
                Message {
                    name: "ExtensionNumberResponse",
                    fields: &[
                        field("base_type_name", 1, Kind::Text),
                        list("extension_number", 2, Kind::Int32),
                    ],
                    ..NO_MESSAGE
                },
                Message {
                    name: "ListServiceResponse",
                    fields: &[list(
                        "service",
                        1,
                        Kind::Message(concat!(".", $package, ".ServiceResponse")),
                    )],
                    ..NO_MESSAGE
                },
                Message {
                    name: "ServiceResponse",
                    fields: &[field("name", 1, Kind::Text)],
                    ..NO_MESSAGE
                },
                Message {
                    name: "ErrorResponse",
                    fields: &[
                        field("error_code", 1, Kind::Int32),
                        field("error_message", 2, Kind::Text),
                    ],
                    ..NO_MESSAGE
                },
            ],
            enums: &[],
            services: &[Service {
                name: "ServerReflection",
                methods: &[Method {
                    name: "ServerReflectionInfo",
                    input: concat!(".", $package, ".ServerReflectionRequest"),
                    output: concat!(".", $package, ".ServerReflectionResponse"),
                    is_client_streaming: true,
                    is_server_streaming: true,
                }],
            }],
        }
    };
}

const HEADER: Kind = Kind::Message(".envoy.config.core.v3.HeaderValue");

pub(super) const FILES: &[File] = &[
    File {
        name: "envoy/service/ratelimit/v3/rls.proto",
        package: "envoy.service.ratelimit.v3",
        depends: &[
            "envoy/config/core/v3/base.proto",
            "envoy/extensions/common/ratelimit/v3/ratelimit.proto",
            "google/protobuf/duration.proto",
            "google/protobuf/struct.proto",
        ],
        messages: &[
            Message {
                name: "RateLimitRequest",
                fields: &[
                    field("domain", 1, Kind::Text),
                    list(
                        "descriptors",
                        2,
                        Kind::Message(".envoy.extensions.common.ratelimit.v3.RateLimitDescriptor"),
                    ),
                    field("hits_addend", 3, Kind::Uint32),
                ],
                ..NO_MESSAGE
            },
            Message {
                name: "RateLimitResponse",
                fields: &[
                    field(
                        "overall_code",
                        1,
                        Kind::Enum(".envoy.service.ratelimit.v3.RateLimitResponse.Code"),
                    ),
                    list(
                        "statuses",
                        2,
                        Kind::Message(
                            ".envoy.service.ratelimit.v3.RateLimitResponse.DescriptorStatus",
                        ),
                    ),
                    list("response_headers_to_add", 3, HEADER),
                    list("request_headers_to_add", 4, HEADER),
                    field("raw_body", 5, Kind::Bytes),
                    field("dynamic_metadata", 6, Kind::Message(".google.protobuf.Struct")),
                ],
                messages: &[
                    Message {
                        name: "RateLimit",
                        fields: &[
                            field("requests_per_unit", 1, Kind::Uint32),
                            field(
                                "unit",
                                2,
                                Kind::Enum(
                                    ".envoy.service.ratelimit.v3.RateLimitResponse.RateLimit.Unit",
                                ),
                            ),
                            field("name", 3, Kind::Text),
                        ],
                        enums: &[Enum { name: "Unit", values: UNITS }],
                        ..NO_MESSAGE
                    },
                    Message {
                        name: "DescriptorStatus",
                        fields: &[
                            field(
                                "code",
                                1,
                                Kind::Enum(".envoy.service.ratelimit.v3.RateLimitResponse.Code"),
                            ),
                            field(
                                "current_limit",
                                2,
                                Kind::Message(
                                    ".envoy.service.ratelimit.v3.RateLimitResponse.RateLimit",
                                ),
                            ),
                            field("limit_remaining", 3, Kind::Uint32),
                            field(
                                "duration_until_reset",
                                4,
                                Kind::Message(".google.protobuf.Duration"),
                            ),
                        ],
                        ..NO_MESSAGE
                    },
                ],
                enums: &[Enum {
                    name: "Code",
                    values: &[("UNKNOWN", 0), ("OK", 1), ("OVER_LIMIT", 2)],
                }],
                ..NO_MESSAGE
            },
        ],
        enums: &[],
        services: &[Service {
            name: "RateLimitService",
            methods: &[Method {
                name: "ShouldRateLimit",
                input: ".envoy.service.ratelimit.v3.RateLimitRequest",
                output: ".envoy.service.ratelimit.v3.RateLimitResponse",
                is_client_streaming: false,
                is_server_streaming: false,
            }],
        }],
    },
    File {
        name: "envoy/config/core/v3/base.proto",
        package: "envoy.config.core.v3",
        depends: &[],
        messages: &[Message {
            name: "HeaderValue",
            fields: &[field("key", 1, Kind::Text), field("value", 2, Kind::Text)],
            ..NO_MESSAGE
        }],
        enums: &[],
        services: &[],
    },
    File {
        name: "envoy/extensions/common/ratelimit/v3/ratelimit.proto",
        package: "envoy.extensions.common.ratelimit.v3",
        depends: &["envoy/type/v3/ratelimit_unit.proto", "google/protobuf/wrappers.proto"],
        messages: &[Message {
            name: "RateLimitDescriptor",
            fields: &[
                list(
                    "entries",
                    1,
                    Kind::Message(
                        ".envoy.extensions.common.ratelimit.v3.RateLimitDescriptor.Entry",
                    ),
                ),
                field(
                    "limit",
                    2,
                    Kind::Message(
                        ".envoy.extensions.common.ratelimit.v3.RateLimitDescriptor.RateLimitOverride",
                    ),
                ),
                field("hits_addend", 3, Kind::Message(".google.protobuf.UInt64Value")),
            ],
            messages: &[
                Message {
                    name: "Entry",
                    fields: &[field("key", 1, Kind::Text), field("value", 2, Kind::Text)],
                    ..NO_MESSAGE
                },
                Message {
                    name: "RateLimitOverride",
                    fields: &[
                        field("requests_per_unit", 1, Kind::Uint32),
                        field("unit", 2, Kind::Enum(".envoy.type.v3.RateLimitUnit")),
                    ],
                    ..NO_MESSAGE
                },
            ],
            ..NO_MESSAGE
        }],
        enums: &[],
        services: &[],
    },
    File {
        name: "envoy/type/v3/ratelimit_unit.proto",
        package: "envoy.type.v3",
        depends: &[],
        messages: &[],
        enums: &[Enum { name: "RateLimitUnit", values: UNITS }],
        services: &[],
    },
    File {
        name: "google/protobuf/duration.proto",
        package: "google.protobuf",
        depends: &[],
        messages: &[Message {
            name: "Duration",
            fields: &[field("seconds", 1, Kind::Int64), field("nanos", 2, Kind::Int32)],
            ..NO_MESSAGE
        }],
        enums: &[],
        services: &[],
    },
    File {
        name: "google/protobuf/struct.proto",
        package: "google.protobuf",
        depends: &[],
        messages: &[
            Message {
                name: "Struct",
                fields: &[list("fields", 1, Kind::Message(".google.protobuf.Struct.FieldsEntry"))],
                messages: &[Message {
                    name: "FieldsEntry",
                    fields: &[
                        field("key", 1, Kind::Text),
                        field("value", 2, Kind::Message(".google.protobuf.Value")),
                    ],
                    is_map_entry: true,
                    ..NO_MESSAGE
                }],
                ..NO_MESSAGE
            },
            Message {
                name: "Value",
                fields: &[
                    one_of("null_value", 1, Kind::Enum(".google.protobuf.NullValue")),
                    one_of("number_value", 2, Kind::Double),
                    one_of("string_value", 3, Kind::Text),
                    one_of("bool_value", 4, Kind::Bool),
                    one_of("struct_value", 5, Kind::Message(".google.protobuf.Struct")),
                    one_of("list_value", 6, Kind::Message(".google.protobuf.ListValue")),
                ],
                oneofs: &["kind"],
                ..NO_MESSAGE
            },
            Message {
                name: "ListValue",
                fields: &[list("values", 1, Kind::Message(".google.protobuf.Value"))],
                ..NO_MESSAGE
            },
        ],
        enums: &[Enum { name: "NullValue", values: &[("NULL_VALUE", 0)] }],
        services: &[],
    },
    File {
        name: "google/protobuf/wrappers.proto",
        package: "google.protobuf",
        depends: &[],
        messages: &[
            wrapper("DoubleValue", &[field("value", 1, Kind::Double)]),
            wrapper("FloatValue", &[field("value", 1, Kind::Float)]),
            wrapper("Int64Value", &[field("value", 1, Kind::Int64)]),
            wrapper("UInt64Value", &[field("value", 1, Kind::Uint64)]),
            wrapper("Int32Value", &[field("value", 1, Kind::Int32)]),
            wrapper("UInt32Value", &[field("value", 1, Kind::Uint32)]),
            wrapper("BoolValue", &[field("value", 1, Kind::Bool)]),
            wrapper("StringValue", &[field("value", 1, Kind::Text)]),
            wrapper("BytesValue", &[field("value", 1, Kind::Bytes)]),
        ],
        enums: &[],
        services: &[],
    },
    File {
        name: "grpc/health/v1/health.proto",
        package: "grpc.health.v1",
        depends: &[],
        messages: &[
            Message {
                name: "HealthCheckRequest",
                fields: &[field("service", 1, Kind::Text)],
                ..NO_MESSAGE
            },
            Message {
                name: "HealthCheckResponse",
                fields: &[field(
                    "status",
                    1,
                    Kind::Enum(".grpc.health.v1.HealthCheckResponse.ServingStatus"),
                )],
                enums: &[Enum {
                    name: "ServingStatus",
                    values: &[
                        ("UNKNOWN", 0),
                        ("SERVING", 1),
                        ("NOT_SERVING", 2),
                        ("SERVICE_UNKNOWN", 3),
                    ],
                }],
                ..NO_MESSAGE
            },
        ],
        enums: &[],
        services: &[Service {
            name: "Health",
            methods: &[
                Method {
                    name: "Check",
                    input: ".grpc.health.v1.HealthCheckRequest",
                    output: ".grpc.health.v1.HealthCheckResponse",
                    is_client_streaming: false,
                    is_server_streaming: false,
                },
                Method {
                    name: "Watch",
                    input: ".grpc.health.v1.HealthCheckRequest",
                    output: ".grpc.health.v1.HealthCheckResponse",
                    is_client_streaming: false,
                    is_server_streaming: true,
                },
            ],
        }],
    },
    reflection_file!("grpc/reflection/v1/reflection.proto", "grpc.reflection.v1"),
    reflection_file!("grpc/reflection/v1alpha/reflection.proto", "grpc.reflection.v1alpha"),
];

impl File {
    /// Returns the full names of everything that the file defines.
    pub(super) fn symbols(&self) -> Vec<String> {
        let mut names = Vec::new();
        for message in self.messages {
            message.symbols(self.package, &mut names);
        }
        names.extend(self.enums.iter().map(|each| format!("{}.{}", self.package, each.name)));
        for service in self.services {
            let name = format!("{}.{}", self.package, service.name);
            names.extend(service.methods.iter().map(|method| format!("{name}.{}", method.name)));
            names.push(name);
        }
        names
    }

    /// Returns the names of the types that the file uses.
    #[cfg(test)]
    pub(super) fn types(&self) -> Vec<&'static str> {
        fn of(message: &'static Message, names: &mut Vec<&'static str>) {
            names.extend(message.fields.iter().filter_map(|field| match field.kind {
                Kind::Message(name) | Kind::Enum(name) => Some(name),
                _ => None,
            }));
            message.messages.iter().for_each(|message| of(message, names));
        }
        let mut names = Vec::new();
        self.messages.iter().for_each(|message| of(message, &mut names));
        let methods = self.services.iter().flat_map(|service| service.methods);
        names.extend(methods.flat_map(|method| [method.input, method.output]));
        names
    }

    /// Writes a `FileDescriptorProto`.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        wire::text(&mut out, 1, self.name);
        wire::text(&mut out, 2, self.package);
        for name in self.depends {
            wire::text(&mut out, 3, name);
        }
        for message in self.messages {
            wire::message(&mut out, 4, |out| message.encode(out));
        }
        for each in self.enums {
            wire::message(&mut out, 5, |out| each.encode(out));
        }
        for service in self.services {
            wire::message(&mut out, 6, |out| service.encode(out));
        }
        wire::text(&mut out, 12, "proto3");
        out
    }
}

impl Message {
    fn symbols(&self, parent: &str, names: &mut Vec<String>) {
        let name = format!("{parent}.{}", self.name);
        for message in self.messages {
            message.symbols(&name, names);
        }
        names.extend(self.enums.iter().map(|each| format!("{name}.{}", each.name)));
        names.push(name);
    }

    fn encode(&self, out: &mut Vec<u8>) {
        wire::text(out, 1, self.name);
        for field in self.fields {
            wire::message(out, 2, |out| field.encode(out));
        }
        for message in self.messages {
            wire::message(out, 3, |out| message.encode(out));
        }
        for each in self.enums {
            wire::message(out, 4, |out| each.encode(out));
        }
        if self.is_map_entry {
            wire::message(out, 7, |out| wire::number(out, 7, 1));
        }
        for name in self.oneofs {
            wire::message(out, 8, |out| wire::text(out, 1, name));
        }
    }
}

impl Field {
    fn encode(&self, out: &mut Vec<u8>) {
        let (kind, name) = match self.kind {
            Kind::Double => (1, None),
            Kind::Float => (2, None),
            Kind::Int64 => (3, None),
            Kind::Uint64 => (4, None),
            Kind::Int32 => (5, None),
            Kind::Bool => (8, None),
            Kind::Text => (9, None),
            Kind::Message(name) => (11, Some(name)),
            Kind::Bytes => (12, None),
            Kind::Uint32 => (13, None),
            Kind::Enum(name) => (14, Some(name)),
        };
        wire::text(out, 1, self.name);
        wire::number(out, 3, u64::from(self.number));
        wire::number(out, 4, if self.is_list { 3 } else { 1 });
        wire::number(out, 5, kind);
        wire::text(out, 6, name.unwrap_or_default());
        if let Some(oneof) = self.oneof {
            // The index 0 must be written: it is not the default, which is no group at all.
            out.extend_from_slice(&[9 << 3, u8::try_from(oneof).unwrap_or(0)]);
        }
    }
}

impl Enum {
    fn encode(&self, out: &mut Vec<u8>) {
        wire::text(out, 1, self.name);
        for (name, number) in self.values {
            wire::message(out, 2, |out| {
                wire::text(out, 1, name);
                // The number 0 must be written as well: readers of proto2 see whether it is there.
                out.extend_from_slice(&[2 << 3, u8::try_from(*number).unwrap_or(0)]);
            });
        }
    }
}

impl Service {
    fn encode(&self, out: &mut Vec<u8>) {
        wire::text(out, 1, self.name);
        for method in self.methods {
            wire::message(out, 2, |out| {
                wire::text(out, 1, method.name);
                wire::text(out, 2, method.input);
                wire::text(out, 3, method.output);
                wire::number(out, 5, u64::from(method.is_client_streaming));
                wire::number(out, 6, u64::from(method.is_server_streaming));
            });
        }
    }
}
